// Does that process still live? A connection, and a hello that is a question: a living process's
// listener answers it, with a refusal as a rule. That the kernel accepts says nothing: it also does
// for a process that is ending, whose sockets close one after the other, and for a stopped one. A
// connection that ends without a word is tried again twice, a few milliseconds later: the process
// may be ending, or something cuts connections, of which this was one.
//
// Loop thread only. The callback runs once, on the loop, never after destruction; it may destroy
// the Probe. It never blocks and reads nothing beyond the answer.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "net/event_loop.h"
#include "net/frame_inbox.h"
#include "net/handshake.h"
#include "net/socket_address.h"

namespace torchft_ext {

class Probe {
 public:
  enum class Answer {
    kAnswered,  // it lives
    kGone,      // nobody listens, three connections ended without a word, or the port is another's
    kSilent,    // connected, no answer by the deadline
    kUnreachable,  // no connection by the deadline, or the network's error
  };
  using Callback = std::function<void(Answer, const std::string& detail)>;

  // who: the life that is asked about.
  Probe(EventLoop& loop, const SocketAddress& address, const Incarnation& who, Deadline deadline,
        Callback callback);
  ~Probe();
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

 private:
  void connect();
  void onConnected();
  void onReadable();
  bool isAnswerOfIts() const;
  void onNoWord(const std::string& detail);
  void closeConnection();
  void finish(Answer answer, const std::string& detail);

  EventLoop& loop_;
  const SocketAddress address_;
  const Incarnation who_;
  UniqueFd fd_;
  bool connected_ = false;
  int tries_left_ = 3;
  std::optional<FrameInbox> inbox_;  // of this connection
  EventLoop::TimerId timer_ = 0;     // the deadline
  EventLoop::TimerId retry_ = 0;
  Callback callback_;
};

}  // namespace torchft_ext
