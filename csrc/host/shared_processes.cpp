#include "host/shared_processes.h"

#include <vector>

#include "base/member_incarnation.h"

namespace torchft_ext {
namespace {

std::string nameOthers(const std::vector<int>& ranks, int but) {
  std::string text;
  for (const int rank : ranks) {
    if (rank != but) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  const bool one = ranks.size() == 2;
  return std::string(one ? "; rank " : "; ranks ") + text + (one ? " was" : " were") +
         " the same process";
}

}  // namespace

SharedProcesses::SharedProcesses(const Roster& roster) {
  std::map<ProcessPart, std::vector<int>> by_process;
  for (size_t rank = 0; rank < roster.members.size(); ++rank)
    by_process[processPartOf(roster.members[rank].incarnation)].push_back(static_cast<int>(rank));
  for (const auto& [process, ranks] : by_process) {
    if (ranks.size() < 2) continue;
    for (const int rank : ranks) others_[rank] = nameOthers(ranks, rank);
  }
}

void SharedProcesses::nameIn(Failure& failure) const {
  if (failure.kind != FailureKind::kPeerLost) return;
  const auto found = others_.find(failure.cause.rank);
  if (found == others_.end() || failure.cause.how.ends_with(found->second)) return;
  failure.cause.how += found->second;
}

}  // namespace torchft_ext
