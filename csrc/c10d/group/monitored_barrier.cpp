#include "c10d/group/monitored_barrier.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/group.h"
#include "comm/op_state.h"
#include "comm/operation.h"

namespace torchft_ext {
namespace {

// Not bit 59, which is that of transfers (host/messages.h), nor one of nccl/bootstrap.cpp's.
constexpr uint64_t kTag = kEngineTag | uint64_t{1} << 58;
constexpr Duration kForAnswers = std::chrono::seconds(1);  // at least
// An operation's own limit is there for one whose waiter has gone: it is never the first to run
// out.
constexpr Duration kBehindTheWaiter = std::chrono::seconds(2);
constexpr size_t kMostNames = 1000;
constexpr size_t kMostExplained = 3;

using State = std::shared_ptr<OpState>;
using States = std::vector<State>;

Duration longer(Duration limit, Duration by) {
  return limit > kCentury ? Duration::max() : limit + by;
}

// The message says nothing: that it comes is the news.
State transfer(const MonitoredBarrier& barrier, OpKind kind, int peer, Duration limit) {
  const auto byte = std::make_shared<std::array<uint8_t, 1>>();
  Operation operation;
  operation.kind = kind;
  operation.peer = peer;
  operation.tag = kTag;
  operation.generation = barrier.generation;
  operation.timeout = longer(limit, kBehindTheWaiter);
  operation.keep_alive = byte;
  auto& buffers = kind == OpKind::kSend ? operation.inputs : operation.outputs;
  buffers = {Buffer{byte->data(), byte->size()}};
  return barrier.group.issue(std::move(operation));
}

bool arrived(const State& state) {
  return state->done() && state->failure() == nullptr;
}

std::string inMilliseconds(Duration limit) {
  return std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(limit).count()) +
         " ms";
}

// The last operations of the missing ranks, as far as they answered: the end of an error.
std::string whatTheyDo(const States& states, const std::vector<size_t>& missing) {
  std::string text;
  size_t told = 0;
  for (const size_t rank : missing) {
    const auto known = states[rank - 1]->waitedFor();
    if (!known || known->empty() || ++told > kMostExplained) continue;
    text += "; " + *known;
  }
  return text;
}

// states: of ranks 1, 2, ...
std::string whoIsMissing(const MonitoredBarrier& barrier, const States& states) {
  std::vector<size_t> missing;
  for (size_t i = 0; i < states.size(); ++i)
    if (!arrived(states[i])) missing.push_back(i + 1);
  if (missing.empty()) missing.push_back(1);  // the last came as the generation failed
  if (!barrier.name_all) missing.resize(1);
  std::string names;
  for (size_t i = 0; i < std::min(missing.size(), kMostNames); ++i)
    names += (i == 0 ? "" : ", ") + std::to_string(missing[i]);
  if (missing.size() > kMostNames)
    names += " and " + std::to_string(missing.size() - kMostNames) + " more";
  return std::string("[Rank 0]: ") + (barrier.name_all ? "Ranks " : "Rank ") + names +
         " failed to pass monitoredBarrier in " + inMilliseconds(barrier.limit) +
         whatTheyDo(states, missing);
}

// What the caller gets: the generation's failure, in this barrier's place. words: empty where the
// failure has them already.
FailurePtr inPlace(const MonitoredBarrier& barrier, const OpState& first, const FailurePtr& failure,
                   const std::string& words) {
  auto placed = std::make_shared<Failure>(*first.inPlace(failure));
  placed->op = "monitored_barrier";
  placed->limit = barrier.limit;
  if (!words.empty()) {
    const std::string how = placed->cause.how.empty() ? toString(placed->kind) : placed->cause.how;
    placed->cause.how = words + ": " + how;
  }
  return placed;
}

// words: with what the generation fails if it has not failed yet.
FailurePtr fail(const MonitoredBarrier& barrier, const OpState& first, const std::string& words) {
  // Refused, or failed by others.
  if (const FailurePtr why = first.failure()) return inPlace(barrier, first, why, words);
  const auto& lifecycle = first.lifecycle();
  Failure failure = lifecycle->ownFailure(FailureKind::kTimeout, words);
  failure.op = "monitored_barrier";
  failure.seq = first.seq();
  failure.limit = barrier.limit;
  failure.elapsed = Clock::now() - first.issuedAt();
  const auto own = std::make_shared<const Failure>(failure);
  if (lifecycle->fail(std::move(failure))) return inPlace(barrier, first, own, "");
  const FailurePtr why = lifecycle->failure();  // null: it has ended, with a goodbye
  return inPlace(barrier, first, why ? why : own, why ? words : "");
}

// False: one of them has not succeeded by the deadline.
bool awaitEach(const States& states, Deadline deadline) {
  return std::all_of(states.begin(), states.end(), [deadline](const State& state) {
    return state->wait(deadline) && state->failure() == nullptr;
  });
}

FailurePtr awaitOthers(const MonitoredBarrier& barrier) {
  const Deadline deadline = Deadline::after(barrier.limit);
  const auto withEach = [&barrier](OpKind kind, Duration limit) {
    States states;
    for (int peer = 1; peer < barrier.size; ++peer)
      states.push_back(transfer(barrier, kind, peer, limit));
    return states;
  };
  const States reports = withEach(OpKind::kRecv, barrier.limit);
  if (barrier.limit <= Duration::zero() && !barrier.name_all) {
    return fail(barrier, *reports.front(),
                "Rank 0 timed out in monitoredBarrier after 0 ms. No ranks successfully processed "
                "in monitoredBarrier");
  }
  if (!awaitEach(reports, deadline))
    return fail(barrier, *reports.front(), whoIsMissing(barrier, reports));
  const Duration for_answers = std::max(kForAnswers, deadline.remaining());
  const States answers = withEach(OpKind::kSend, for_answers);
  if (!awaitEach(answers, Deadline::after(for_answers)))
    return fail(barrier, *reports.front(), whoIsMissing(barrier, answers));
  return nullptr;
}

FailurePtr awaitRankZero(const MonitoredBarrier& barrier) {
  const Duration patience = longer(std::max(barrier.limit, barrier.group.timeout()), kForAnswers);
  const State report = transfer(barrier, OpKind::kSend, 0, patience);
  const State answer = transfer(barrier, OpKind::kRecv, 0, patience);
  if (answer->wait(Deadline::after(patience)) && answer->failure() == nullptr) return nullptr;
  return fail(barrier, *report,
              "Rank " + std::to_string(barrier.rank) +
                  " successfully reached monitoredBarrier, but received errors while waiting for "
                  "send/recv from rank 0. Please check rank 0 logs for faulty rank");
}

}  // namespace

FailurePtr await(const MonitoredBarrier& barrier) {
  if (barrier.size == 1) return barrier.group.errored();
  try {
    return barrier.rank == 0 ? awaitOthers(barrier) : awaitRankZero(barrier);
  } catch (...) {
    barrier.group.abortGeneration(barrier.generation, "a signal interrupted monitored_barrier()");
    throw;
  }
}

}  // namespace torchft_ext
