// The errors of an elastic job: why a call failed.
#pragma once

#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

namespace torchft_ext {

enum class ElasticErrorKind {
  kNoQuorum,  // too few voters of the last view are present to decide on the next one
  kLeftOut,   // this member is not in the newest view: join again
  kTimeout,   // the votes of others, or a view with this member, did not come by the deadline
  kStore,     // the job's store does not answer
  kState,     // this member has left, or its process is ending
  kNetwork,   // no port, no descriptor
  // Several views of the same members failed, with a cause that another view would not remove. The
  // text names the cause.
  kNoProgress,
  kJobOver,  // the job has ended well, before this process came or was needed: a JobOverError
};

class ElasticError : public std::runtime_error {
 public:
  ElasticError(ElasticErrorKind kind, const std::string& text)
      : std::runtime_error(text), kind_(kind) {}
  ElasticErrorKind kind() const { return kind_; }

 private:
  ElasticErrorKind kind_;
};

// The job has ended well: its members agreed on that. Another run needs another name.
class JobOverError : public ElasticError {
 public:
  JobOverError(const std::string& text, std::chrono::system_clock::time_point ended_at, int members)
      : ElasticError(ElasticErrorKind::kJobOver, text), ended_at_(ended_at), members_(members) {}
  // By the clock of the member that recorded it.
  std::chrono::system_clock::time_point endedAt() const { return ended_at_; }
  int members() const { return members_; }  // of the last view

 private:
  std::chrono::system_clock::time_point ended_at_;
  int members_;
};

}  // namespace torchft_ext
