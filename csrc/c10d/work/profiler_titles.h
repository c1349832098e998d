// What profilers show of a group's operations: "ft:all_reduce", or under another backend's name
// what that one shows. A value. Threads: any.
#pragma once

#include <string>
#include <utility>

namespace torchft_ext {

class ProfilerTitles {
 public:
  explicit ProfilerTitles(std::string backend_name) : backend_name_(std::move(backend_name)) {}

  // title: a literal that begins with "ft:". What it returns lives as long as the process.
  const char* of(const char* title) const;

 private:
  std::string backend_name_;
};

}  // namespace torchft_ext
