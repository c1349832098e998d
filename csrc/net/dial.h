// One attempt to connect to a peer's port and to get an answer to a hello. Unlike Connector it
// tries once and says how the attempt ended, since for who asks whether a process lives "refused"
// and "silent" are answers: livenessShownBy() says which end is which, for all who ask.
//
// Loop thread only. The callback runs once, on the loop, never from the constructor nor after
// destruction; it may destroy the Dial. Never reads a byte beyond the answer.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "net/event_loop.h"
#include "net/frame.h"
#include "net/handshake.h"
#include "net/liveness.h"
#include "net/socket_address.h"

namespace torchft_ext {

class Dial {
 public:
  enum class End {
    kWelcomed,     // fd is the connection
    kAnswered,     // a refusal: code
    kRefused,      // nobody listens at the port
    kUnreachable,  // no connection by connect_by, or the network's error
    kBroken,       // connected, then closed or reset or nonsense
    kSilent,       // connected, no answer within answer_within
    kNoSocket,     // this process lacks a descriptor or memory now: says nothing of the peer
  };
  struct Result {
    End end = End::kBroken;
    UniqueFd fd;
    RefusalCode code = RefusalCode::kUnknownGeneration;
    std::string detail;
  };
  using Callback = std::function<void(Result)>;
  // How a connection ends for which connect(2) gives this errno.
  static End endOfError(int error);

  // Time in which this process did not run is nobody's silence: where a limit is found to be over
  // late, the lateness is added to it, once.
  // expected: by a zero incarnation, whoever listens there.
  // answer_within: of the hello, which a process that was itself stopped sends late; negative: for
  // as long as it takes.
  Dial(EventLoop& loop, const SocketAddress& address, const Hello& hello, const Welcome& expected,
       Deadline connect_by, Duration answer_within, Callback callback);
  ~Dial();
  Dial(const Dial&) = delete;
  Dial& operator=(const Dial&) = delete;

 private:
  void onEvent();
  void onConnected();
  void readAnswer();
  bool readUpTo(size_t size);  // false: not all there yet, or finished
  void onAnswer(FrameType type, std::string_view payload);
  void arm(Deadline due);
  void onTime();
  void finish(End end, std::string detail, RefusalCode code = RefusalCode::kUnknownGeneration);

  EventLoop& loop_;
  const std::string hello_;
  const Welcome expected_;
  const Duration answer_within_;
  Callback callback_;
  UniqueFd fd_;
  bool connected_ = false;
  EventLoop::TimerId timer_ = 0;
  Deadline due_ = Deadline::never();  // the timer
  bool credited_ = false;
  std::string answer_;
};

// What a dial's end says of the process that was asked for. A refusal is a sign of life, unless
// another process gives it; that the kernel accepts is none. nullopt: one dial does not tell, it
// met the network's trouble, a connection that ended without a word, or this process's own trouble.
std::optional<Liveness> livenessShownBy(const Dial::Result& result);

// The hello that asks no more than whether that process lives. Whoever listens answers it.
Hello lifeQuestion(const Incarnation& self, const Incarnation& to, uint8_t channel = 0);

}  // namespace torchft_ext
