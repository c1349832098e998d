// Who a connection belongs to, and the proof that it may. The connector says hello; the acceptor
// looks the nonce up, compares the secret and answers. Used by Listener, Connector and Dial.
//
// A member of a generation is (nonce, rank, incarnation); a pair of members may have several
// channels.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/identity.h"

namespace torchft_ext {

struct Hello {
  Nonce nonce;
  Identity<struct ConnectorHalf> proof;
  Incarnation from;
  // A port may have been taken over by another process: refused then. Zero: whoever listens there.
  Incarnation to;
  int32_t rank = -1;
  uint8_t channel = 0;
};
std::string encodeHello(const Hello& hello);                 // a whole frame
std::optional<Hello> decodeHello(std::string_view payload);  // nullopt: malformed

// The nonce of a hello that asks whether a process lives: of no generation. Whoever listens answers
// it, with a welcome or a refusal, and closes the connection.
inline constexpr Nonce kProbeNonce{};

struct Welcome {
  Identity<struct AcceptorHalf> proof;
  Incarnation from;
};
std::string encodeWelcome(const Welcome& welcome);  // a whole frame
std::optional<Welcome> decodeWelcome(std::string_view payload);

// A refusal that will not change (wrong secret, wrong process) ends the attempt to connect; one
// that may (the generation is unknown here: behind or ahead) does not.
enum class RefusalCode : uint8_t {
  kUnknownGeneration = 1,
  kWrongSecret = 2,
  kWrongProcess = 3,
  // follows a welcome: the generation has that member, channel or rank already, or no such
  kDuplicate = 4,
  kWrongVersion = 5,
};
struct Refusal {
  RefusalCode code;
  std::string reason;  // at most 200 bytes, printable once decoded
};
std::string encodeRefusal(const Refusal& refusal);  // a whole frame
std::optional<Refusal> decodeRefusal(std::string_view payload);

}  // namespace torchft_ext
