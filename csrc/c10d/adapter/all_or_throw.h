// Calls that are all made, though a signal's handler throws in one of them: the first exception
// leaves with the object. Of one thread.
#pragma once

#include <exception>

namespace torchft_ext {

class AllOrThrow {
 public:
  AllOrThrow() = default;
  AllOrThrow(const AllOrThrow&) = delete;
  AllOrThrow& operator=(const AllOrThrow&) = delete;
  ~AllOrThrow() noexcept(false) {
    if (first_) std::rethrow_exception(first_);
  }
  template <typename Call>
  void run(const Call& call) {
    try {
      call();
    } catch (...) {
      if (!first_) first_ = std::current_exception();
    }
  }

 private:
  std::exception_ptr first_;
};

}  // namespace torchft_ext
