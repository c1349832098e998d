// What processes tell each other over their connections, of a generation or of a process: a value,
// and its bytes.
//
// Parsing is total, and every text is bounded (net/failure_frame.h). Ranks are not compared with
// the generation's size here: whoever gets a notice may not know the generation yet.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/identity.h"
#include "torchft_ext/failure.h"

namespace torchft_ext {

struct Notice {
  enum class Type : uint8_t {
    kFailed = 1,  // the generation failed
    kLeft = 2,    // a member left the generation, which goes on without it
    kAsk = 3,     // the sender takes part in the generation: whoever knows more is to say so
    kSeek = 4,    // the sender hears nothing of a process; to that process itself: is it there?
    kSeen = 5,    // that process has answered since the question was put
  };

  Type type = Type::kAsk;
  Nonce generation;    // kSeek, kSeen: the question instead
  Failure failure;     // kFailed: kind and cause
  Incarnation dead;    // kFailed: the process that ended, where that is the cause; else zero
  int rank = -1;       // kLeft: who
  Incarnation sought;  // kSeek, kSeen
};

std::string encodeNotice(const Notice& notice);  // the payload of a kNotice frame
std::optional<Notice> decodeNotice(std::string_view payload);

}  // namespace torchft_ext
