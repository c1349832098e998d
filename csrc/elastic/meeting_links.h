// The connections of one process to the meeting places of others (meeting.h), by numbers that their
// user chooses.
//
// Owner: an ElasticMember. Loop thread only; what it is told is called on the loop. Destroyed or
// closed, a connection tells nothing any more.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "elastic/meeting.h"
#include "elastic/view_store.h"
#include "net/dial.h"
#include "net/framed_socket.h"

namespace torchft_ext {

class MeetingLinks {
 public:
  struct Events {
    std::function<void(const Standing&)> on_met;  // both have proved that they know the key
    std::function<void(uint64_t number, const StoreAnswer& answer)> on_answer;
    std::function<void(const std::string& report)> on_report;  // encoded; empty: asks for none
    std::function<void(const std::string& why)> on_end;        // once, as the last call
  };
  static constexpr std::chrono::seconds kAnswerWithin{2};  // of the hello

  MeetingLinks(EventLoop& loop, MeetingKey key) : loop_(loop), key_(std::move(key)) {}

  void open(uint64_t id, const SocketAddress& address, Events events);
  void call(uint64_t id, uint64_t number, const StoreCall& call);
  void inquire(uint64_t id);  // once it has met
  void close(uint64_t id) { links_.erase(id); }
  // For good: all end, and so does what is opened later.
  void finish();

 private:
  struct Link {
    Events events;
    std::unique_ptr<Dial> dial;
    std::unique_ptr<FramedSocket> socket;
    Challenge own = Challenge::random();
    Challenge theirs;
    bool challenged = false;
    bool met = false;
  };
  void onDialled(uint64_t id, Dial::Result result);
  void onFrame(uint64_t id, const FrameHeader& header, const std::string& payload);
  void answerChallenge(uint64_t id, const std::string& payload);
  void checkProof(uint64_t id, const std::string& payload);
  void end(uint64_t id, const std::string& why);

  EventLoop& loop_;
  const MeetingKey key_;
  std::map<uint64_t, Link> links_;
  bool finished_ = false;
};

}  // namespace torchft_ext
