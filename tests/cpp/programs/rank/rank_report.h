// What a rank of the failure matrix says: one JSON object a line on stdout. Any thread.
#pragma once

#include <iostream>
#include <string>

#include "base/deadline.h"
#include "base/mutex.h"
#include "torchft_ext/failure.h"

namespace torchft_ext {

inline std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + "\"";
}

// group: of which group it speaks; empty for the default group and for the process.
inline void say(const std::string& group, const std::string& event, const std::string& fields) {
  static Mutex mutex;
  MutexLock lock(mutex);
  std::cout << "{\"event\":" << quoted(event) << ",\"group\":" << quoted(group)
            << (fields.empty() ? "" : ",") << fields << "}" << std::endl;
}

inline std::string nowField() {
  return "\"t_ns\":" + std::to_string(Clock::now().time_since_epoch().count());
}

inline std::string failureFields(const FailurePtr& failure) {
  if (!failure) return "\"ok\":true";
  return "\"ok\":false,\"kind\":" + quoted(toString(failure->kind)) +
         ",\"cause\":" + std::to_string(failure->cause.rank) +
         ",\"other\":" + std::to_string(failure->cause.other_rank) +
         ",\"pid\":" + std::to_string(failure->cause.pid) + ",\"op\":" + quoted(failure->op) +
         ",\"text\":" + quoted(failure->describe());
}

}  // namespace torchft_ext
