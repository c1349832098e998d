// What a process keeps for others that come to its address (meeting.h): before the job is founded,
// the seats of those that found it; afterwards the founding, and where the members are.
//
// Owner: an ElasticMember. Loop thread only. What a client put under "seat/" goes with its
// connection: it may have gone to another place, or died.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "elastic/meeting.h"
#include "elastic/view_store.h"
#include "net/framed_socket.h"
#include "net/listener.h"

namespace torchft_ext {

class MeetingServer {
 public:
  static constexpr size_t kMostUnproven = 64;
  static constexpr size_t kMostAskers = 64;  // at a place that answers inquiries
  static constexpr std::chrono::seconds kProveWithin{5};

  MeetingServer(EventLoop& loop, MeetingKey key);
  ~MeetingServer();
  MeetingServer(const MeetingServer&) = delete;
  MeetingServer& operator=(const MeetingServer&) = delete;

  // From now on clients may ask how the job is, and make no calls; each has kProveWithin for all
  // of it. report: encoded.
  void answerInquiries(std::function<std::string()> report) { report_ = std::move(report); }

  bool admit(Arrival& arrival);
  // This process's own word, for all who come.
  void put(const std::string& key, const std::string& value);
  // Clients that were told of a better one are sent away, to look for another place.
  void setStanding(const Standing& standing);

 private:
  struct Client {
    std::unique_ptr<FramedSocket> socket;
    Challenge challenge;
    bool proven = false;
    EventLoop::TimerId timer = 0;
    std::set<std::string> seats;
  };
  void onFrame(const MemberId& id, const FrameHeader& header, const std::string& payload);
  bool hasRoom() const;
  void onInquiry(const MemberId& id);
  bool prove(Client& client, const std::string& payload);
  void onEnd(const MemberId& id);
  void reply(const MemberId& to, uint64_t number, const StoreAnswer& answer);

  EventLoop& loop_;
  const MeetingKey key_;
  Standing standing_;
  ViewStoreServer store_;
  std::function<std::string()> report_;  // empty: it answers no inquiries
  std::map<MemberId, Client> clients_;   // each under an id of its own
  uint64_t next_put_ = 1;
};

}  // namespace torchft_ext
