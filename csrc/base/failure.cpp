#include "torchft_ext/failure.h"

#include <algorithm>
#include <cstdio>
#include <string_view>

namespace torchft_ext {
namespace {

std::string nameOfOperation(const Failure& failure) {
  if (failure.seq < 0) return failure.op;
  return failure.op + " #" + std::to_string(failure.seq);
}

std::string whereNoticed(const Failure& failure) {
  std::string text = nameOfOperation(failure);
  if (!failure.group.empty()) {
    text += (text.empty() ? "group '" : " on '") + failure.group + "'";
  }
  if (failure.rank >= 0) {
    text += text.empty() ? "(rank " : " (rank ";
    text += std::to_string(failure.rank) + "/" + std::to_string(failure.size);
    if (failure.generation >= 0) text += ", generation " + std::to_string(failure.generation);
    text += ")";
  }
  return text;
}

// "rank 6 (host b, pid 812)", with as much of it as is known.
std::string nameOfProcess(const Cause& cause) {
  std::string place;
  if (!cause.host.empty()) place = "host " + cause.host;
  if (cause.pid >= 0) place += (place.empty() ? "pid " : ", pid ") + std::to_string(cause.pid);
  if (cause.rank < 0) return place;
  const std::string name = "rank " + std::to_string(cause.rank);
  return place.empty() ? name : name + " (" + place + ")";
}

// Empty where the cause lies with this rank, which the message has named already, unless what
// follows was worded for others ("it issued ...") and needs its subject.
std::string whoCaused(const Failure& failure) {
  const Cause& cause = failure.cause;
  if (failure.kind == FailureKind::kConnectionLost && cause.other_rank >= 0) {
    const std::string near = nameOfProcess(cause);
    const std::string far = "rank " + std::to_string(cause.other_rank);
    return near.empty() ? "the connection to " + far
                        : "the connection between " + near + " and " + far;
  }
  if (cause.rank >= 0 && cause.rank == failure.rank)
    return cause.how.starts_with("it ") || cause.how.starts_with("its ") ? "this rank" : "";
  return nameOfProcess(cause);
}

std::string how(const Failure& failure, bool names_someone) {
  std::string_view clause = failure.cause.how;
  const std::string own = nameOfOperation(failure) + " ";
  if (!names_someone && own.size() > 1 && clause.starts_with(own)) clause.remove_prefix(own.size());
  return clause.empty() ? toString(failure.kind) : std::string(clause);
}

std::string when(const Failure& failure) {
  if (failure.elapsed.count() <= 0) return "";
  return failure.op.empty() ? ", after " + formatSeconds(failure.elapsed)
                            : ", " + formatSeconds(failure.elapsed) + " into the " + failure.op;
}

std::string wordsOfTimeout(const Failure& failure) {
  // Not of an operation that another one's timeout ended early.
  if (failure.limit.count() > 0 && failure.elapsed >= failure.limit) {
    const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(failure.limit);
    return "timed out after a timeout of " + formatSeconds(failure.limit) + ": Timed out waiting " +
           std::to_string(limit.count()) + "ms";
  }
  const int rank = failure.cause.rank;
  const std::string whose = rank == failure.rank ? "this rank" : "rank " + std::to_string(rank);
  return "timed out after a timeout of " + (rank < 0 ? "a rank" : whose);
}

// What programs that were written for torch's own backends look for in an error's text, in the
// spelling of those; tests/python/operations/test_words.py has who looks.
std::string wordsThatCallersMatch(const Failure& failure) {
  switch (failure.kind) {
    case FailureKind::kPeerLost:
    case FailureKind::kPeerLeft:
    case FailureKind::kConnectionLost:
      return "Connection closed by peer";
    case FailureKind::kTimeout:
      return wordsOfTimeout(failure);
    case FailureKind::kAborted:
      return "communicator was aborted";
    case FailureKind::kMismatch:
      return "mismatch";
    case FailureKind::kStoreLost:
    case FailureKind::kRendezvous:
    case FailureKind::kInternal:
      break;
  }
  return "";
}

// Members differ in what they come with, not in what they have issued.
bool isOfForming(const Failure& failure) {
  return failure.op == "configure";
}

std::string nextStepInJob(const Failure& failure) {
  std::string again = "elastic.steps() goes on by itself; a loop of your own calls job.recover()";
  if (failure.in_job == InJob::kOfOneView) {
    again +=
        "; make this group anew in the next view, in build= of elastic.steps(), or have "
        "job.manage() do so";
  } else if (failure.in_job == InJob::kMadeAnew) {
    again += ", and take the group that it makes from job.managed_group()";
  }
  if (failure.kind == FailureKind::kMismatch && !isOfForming(failure)) {
    return "make all ranks issue the same operations in the same order, then " + again;
  }
  if (failure.kind == FailureKind::kInternal) {
    return "this is a fault in torchft_ext: please report it; " + again;
  }
  return again;
}

std::string nextStep(const Failure& failure) {
  const bool made_anew = failure.in_job == InJob::kMadeAnew;
  if (failure.needs_new_group && !made_anew) return "make a new group";
  if (failure.in_job != InJob::kNo) return nextStepInJob(failure);
  const std::string again = "begin a new generation with configure()";
  switch (failure.kind) {
    case FailureKind::kPeerLost:
    case FailureKind::kPeerLeft:
      if (failure.cause.rank < 0 || failure.cause.rank == failure.rank) return again;
      return again + ", without rank " + std::to_string(failure.cause.rank);
    case FailureKind::kStoreLost:
      return "call configure() again, with a store that can be reached";
    case FailureKind::kMismatch:
      if (isOfForming(failure)) return "correct this, then " + again;
      return "make all ranks issue the same operations in the same order, then " + again;
    case FailureKind::kRendezvous:
      if (failure.cause.rank < 0 || failure.cause.rank == failure.rank)
        return "correct this, then call configure() again";
      return "correct this on rank " + std::to_string(failure.cause.rank) +
             ", then call configure() again on all ranks";
    case FailureKind::kInternal:
      return "this is a fault in torchft_ext: please report it; " + again;
    case FailureKind::kConnectionLost:
    case FailureKind::kTimeout:
    case FailureKind::kAborted:
      break;
  }
  return again;
}

}  // namespace

const char* toString(FailureKind kind) {
  switch (kind) {
    case FailureKind::kPeerLost:
      return "peer lost";
    case FailureKind::kPeerLeft:
      return "peer left";
    case FailureKind::kConnectionLost:
      return "connection lost";
    case FailureKind::kTimeout:
      return "timeout";
    case FailureKind::kAborted:
      return "aborted";
    case FailureKind::kStoreLost:
      return "store lost";
    case FailureKind::kMismatch:
      return "operations do not match";
    case FailureKind::kRendezvous:
      return "rendezvous refused";
    case FailureKind::kInternal:
      return "internal error";
  }
  return "unknown failure";  // a number from the wire that this version does not know
}

std::string formatSeconds(std::chrono::nanoseconds duration) {
  double seconds = std::chrono::duration<double>(duration).count();
  if (duration.count() > 0) seconds = std::max(seconds, 0.001);
  char text[64];
  // std::format is not in gcc 12
  const int length = std::snprintf(text, sizeof text, "%.3f", seconds);
  std::string result(text, static_cast<size_t>(std::max(length, 0)));
  result.erase(result.find_last_not_of('0') + 1);
  if (result.ends_with('.')) result.pop_back();
  return result + " s";
}

std::string Failure::describe() const {
  const std::string where = whereNoticed(*this);
  const std::string who = whoCaused(*this);
  std::string text = where.empty() ? "" : where + ": ";
  if (!who.empty()) text += who + ": ";
  text += how(*this, !who.empty()) + when(*this);
  const std::string words = wordsThatCallersMatch(*this);
  if (text.find(words) == std::string::npos) text += " (" + words + ")";
  return text + "; " + nextStep(*this);
}

}  // namespace torchft_ext
