// The titles under which profilers show a group's operations: "ft:all_reduce", or the same with the
// name of the backend in whose place the group stands. A value. Threads: any.
#pragma once

#include <string>
#include <utility>

namespace torchft_ext {

class ProfilerTitles {
 public:
  explicit ProfilerTitles(std::string backend_name) : backend_name_(std::move(backend_name)) {}

  // title: a literal that begins with "ft:". The returned text lives as long as the process.
  const char* of(const char* title) const;

 private:
  std::string backend_name_;
};

}  // namespace torchft_ext
