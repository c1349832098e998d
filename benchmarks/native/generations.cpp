#include "generations.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>

#include "processes.h"

namespace torchft_ext::bench {
namespace {

Row rowOf(const std::string& op) {
  Row row;
  row.op = op;
  return row;
}

int64_t now() {  // nanoseconds
  return std::chrono::nanoseconds(BenchClock::now().time_since_epoch()).count();
}

std::string prefixOf(const std::string& what, int round) {
  return what + "/" + std::to_string(round);
}

// When this survivor was released. Rank 0 kills the victim once all others wait for it, and sets
// `killed` to the time just before.
int64_t awaitDeath(const Member& member, const Process* victim, int64_t* killed) {
  Comm& comm = member.comm;
  char from_victim = 0;
  char ready = 0;
  const Request waiting = comm.recv(&from_victim, 1, DataType::kUint8, member.size - 1);
  if (victim == nullptr) {
    comm.send(&ready, 1, DataType::kUint8, 0).tryWait();
  } else {
    for (int rank = 1; rank < member.size - 1; ++rank) {
      comm.recv(&ready, 1, DataType::kUint8, rank).wait();
    }
    *killed = now();
    victim->kill();
  }
  if (waiting.tryWait() == nullptr) throw std::runtime_error("a victim has sent something");
  return now();
}

Process startVictim(const Member& member, const std::string& prefix) {
  Arguments arguments = member.arguments;
  arguments.role = "victim";
  arguments.rank = member.size - 1;
  arguments.prefix = prefix;
  return Process(arguments);
}

// One death; on rank 0: how long each survivor took to hear of it, in microseconds.
std::vector<double> oneDeath(const Member& member, int round) {
  const std::string prefix = prefixOf("death", round);
  std::optional<Process> victim;
  if (member.rank == 0) victim.emplace(startVictim(member, prefix));
  member.comm.configure(member.store, prefix, member.rank, member.size);
  int64_t killed = 0;
  const int64_t released = awaitDeath(member, victim ? &*victim : nullptr, &killed);
  const int survivors = member.size - 1;
  member.comm.configure(member.store, prefix + "/after", member.rank, survivors);
  std::vector<int64_t> all(static_cast<size_t>(survivors));
  member.comm.gather(&released, all.data(), 1, DataType::kInt64, 0).wait();
  std::vector<double> took;
  took.reserve(all.size());
  for (const int64_t each : all) took.push_back(static_cast<double>(each - killed) / 1e3);
  return took;
}

}  // namespace

Row measureConfigure(const Member& member) {
  Row row = rowOf("configure");
  for (int i = 0; i < member.arguments.rounds; ++i) {
    member.comm.barrier().wait();
    const auto began = BenchClock::now();
    member.comm.configure(member.store, prefixOf("configure", i), member.rank, member.size);
    row.times.push_back(microseconds(BenchClock::now() - began));
  }
  return row;
}

Row measureAbort(const Member& member) {
  Row row = rowOf("abort");
  char nothing = 0;
  for (int i = 0; i < member.arguments.rounds; ++i) {
    const int from = member.rank == 0 ? member.size - 1 : 0;
    const Request waiting = member.comm.recv(&nothing, 0, DataType::kUint8, from);
    const auto began = BenchClock::now();
    if (member.rank == 0) member.comm.abort("the benchmark");
    waiting.tryWait();
    row.times.push_back(microseconds(BenchClock::now() - began));
    member.comm.configure(member.store, prefixOf("abort", i), member.rank, member.size);
  }
  return row;
}

std::vector<Row> measureDeath(const Member& member) {
  if (member.size < 2) throw std::invalid_argument("--op death: needs a world of at least 2");
  Row each = rowOf("death");
  Row last = rowOf("death_last");
  for (int i = 0; i < member.arguments.rounds && member.rank < member.size - 1; ++i) {
    const std::vector<double> took = oneDeath(member, i);
    each.times.insert(each.times.end(), took.begin(), took.end());
    last.times.push_back(*std::max_element(took.begin(), took.end()));
  }
  // The last rank, whose place the victims had, waits here.
  member.comm.configure(member.store, "death/over", member.rank, member.size);
  return {each, last};
}

void beVictim(const Arguments& arguments, Comm& comm, const std::shared_ptr<Store>& store) {
  comm.configure(store, arguments.prefix, arguments.rank, arguments.world);
  char never = 0;
  comm.recv(&never, 1, DataType::kUint8, 0).tryWait();
}

}  // namespace torchft_ext::bench
