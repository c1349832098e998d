// Why a call of an elastic job came to nothing.
#pragma once

#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

namespace torchft_ext {

enum class ElasticErrorKind {
  kNoQuorum,  // too few voters of the last view are there to decide on the next
  kLeftOut,   // a newer view is without this member: join again
  kTimeout,   // not by the deadline: others' votes, or a place in a view
  kStore,     // the job's store does not answer
  kState,     // this member has left, or its process is through
  kNetwork,   // no port, no descriptor
  // Views of the same members came to nothing again and again, by a cause that another view does
  // not mend. The text names it.
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
