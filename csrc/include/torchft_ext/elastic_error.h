// Why a call of an elastic job came to nothing.
#pragma once

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
};

class ElasticError : public std::runtime_error {
 public:
  ElasticError(ElasticErrorKind kind, const std::string& text)
      : std::runtime_error(text), kind_(kind) {}
  ElasticErrorKind kind() const { return kind_; }

 private:
  ElasticErrorKind kind_;
};

}  // namespace torchft_ext
