// What a test's code writes to the log.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "base/log.h"
#include "base/mutex.h"

namespace torchft_ext {

// Keeps every line that is logged while it lives. One at a time; its functions: any thread.
class CapturedLog {
 public:
  CapturedLog() {
    lines().clear();
    setLogSink(keep);
  }
  ~CapturedLog() { setLogSink(nullptr); }
  CapturedLog(const CapturedLog&) = delete;
  CapturedLog& operator=(const CapturedLog&) = delete;

  static bool contains(const std::string& text) {
    MutexLock lock(mutex());
    return std::any_of(lines().begin(), lines().end(), [&](const std::string& line) {
      return line.find(text) != std::string::npos;
    });
  }

  static std::vector<std::string> all() {
    MutexLock lock(mutex());
    return lines();
  }

 private:
  static Mutex& mutex() {
    static Mutex instance;
    return instance;
  }
  static std::vector<std::string>& lines() {
    static std::vector<std::string> instance;
    return instance;
  }
  static void keep(LogLevel, const std::string& line) {
    MutexLock lock(mutex());
    lines().push_back(line);
  }
};

}  // namespace torchft_ext
