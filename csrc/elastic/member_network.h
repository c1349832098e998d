// Messages between the members of one job: where they listen, the connections between them, and
// which of them live.
//
// Each member connects to whom it has something to say; on that connection it alone speaks. So two
// members have two connections, and what one says arrives in order while its connection stands.
// What was under way when one broke may be lost: onConnected tells that there is a new one. A
// connection that breaks or cannot be made is no verdict: the peer's port is asked (net/probe.h),
// and who is alive is connected to anew.
//
// Owner: an ElasticMember. Loop thread only, but for the constructor. The events are called on the
// loop. Both ends of a connection prove who they are (elastic/member_keys.h) before anything is
// said. Who does not within kProveWithin, or the limit if that is longer, is cut off; so is the
// oldest of kMostUnproven when another one comes. A member whose tries to do so have failed for the
// limit and kProveWithin is told as unreachable. A connection on which less was proved than its
// member has to prove in a new view is made anew.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "elastic/losses.h"
#include "elastic/member_keys.h"
#include "elastic/view.h"
#include "membership/records.h"
#include "net/dial.h"
#include "net/framed_socket.h"
#include "net/listener.h"
#include "net/probe.h"

namespace torchft_ext {

class MemberNetwork {
 public:
  struct Events {
    std::function<void(const MemberId& from, const FrameHeader&, std::string payload)> on_message;
    std::function<void(const MemberId&)> on_connected;  // what was said before may be lost
    // The connection from it ended, and no other one came: what it said last may be lost.
    std::function<void(const MemberId&)> on_disconnected;
    std::function<void(const MemberId&, Loss, const std::string& how)> on_lost;
    std::function<void(const MemberId&)> on_alive;    // it was asked whether it lives
    std::function<void(const MemberId&)> on_goodbye;  // it goes soon; until then it answers
  };
  static constexpr size_t kMostWaiting =
      1024;  // messages to a member to which no connection stands
  static constexpr std::chrono::seconds kProveWithin{2};
  static constexpr std::ptrdiff_t kMostUnproven = 256;  // connections of others

  // limit: after which a member that does not answer counts as frozen.
  MemberNetwork(EventLoop& loop, Duration limit, Events events);
  ~MemberNetwork();
  MemberNetwork(const MemberNetwork&) = delete;
  MemberNetwork& operator=(const MemberNetwork&) = delete;

  // Empty: it listens. Then where, for the member's own record.
  std::string open(const SocketAddress& address, PortRange ports);
  std::vector<SocketAddress> addresses() const;
  // Of this member alone: the process may have been another member before, at the same port.
  const Incarnation& incarnation() const { return incarnation_; }
  // After open(): who this is, with a record that says where.
  void setSelf(const Member& self);
  // Once the job is known, before anybody is sent to. Who has come earlier is let in now.
  void admitMembers(const JobKey& key);
  // A view that this member is in: its members prove that they have been in one with it, also those
  // to whom a connection stands. May end the connection on whose message it is called.
  void enterView(const View& view);
  // Others that come to this process's address with that nonce; the handler owns their connections.
  void admitClients(const Nonce& nonce, Listener::Handler handler);

  // From now on messages to it can be sent. Where it was known at another address, the connection
  // to that one ends.
  void introduce(const Member& member);
  bool knows(const MemberId& id) const { return peers_.contains(id); }
  // As it has proved to be, or as a view has it; unknown: nobody.
  Member memberOf(const MemberId& id) const;
  void send(const MemberId& to, FrameHeader header, std::string payload);
  // The same, and it goes out by flush(): what one member is told at once is one system call, and
  // wakes it once.
  void add(const MemberId& to, FrameHeader header, std::string payload);
  void flush();
  // Has it been said something that no connection has taken yet?
  bool hasUnsent(const MemberId& id) const;
  // Connects to it, if nothing stands yet.
  void prepare(const MemberId& id);
  // Does it live? Told by on_lost if not; at most one question at a time for each.
  void ask(const MemberId& id);
  // Of all others nothing is kept any more.
  void keepOnly(const std::set<MemberId>& ids);
  void sayGoodbye();
  // No more is sent, and what was, gets through; who asks from now on hears that nobody is here.
  void finish();
  // After it: have the peers read all of it, or are gone?
  bool finished() const;

 private:
  struct Peer {
    Member member;
    MemberRecord record;
    bool was_connected = false;  // or something that was to be sent has been dropped
    size_t failed_dials = 0;
    EventLoop::TimerId again = 0;
    std::unique_ptr<Dial> dial;
    std::unique_ptr<FramedSocket> out;
    bool is_proved = false;  // both ends of `out` know who the other one is
    ViewName proved_by;      // that
    std::optional<ProvedConnection> proving;
    EventLoop::TimerId prove_by = 0;
    std::optional<Clock::time_point> unproved_since;  // of tries that failed, one after the other
    std::unique_ptr<Probe> probe;
    std::deque<std::pair<FrameHeader, std::string>> waiting;
  };
  struct Incoming {
    std::unique_ptr<FramedSocket> socket;
    Member from;  // a zero id: it has not proved who it is yet
    ViewName proved_by;
    Challenge challenge;
    EventLoop::TimerId prove_by = 0;
  };

  bool admit(Arrival& arrival);
  void onFrame(uint64_t incoming, const FrameHeader& header, std::string payload);
  bool letIn(Incoming& incoming, const std::string& payload);
  void onIncomingEnd(uint64_t incoming);
  void drop(uint64_t incoming);
  void connect(const MemberId& id);
  void connectLater(const MemberId& id);
  void reopen(const MemberId& id);
  void onDialled(const MemberId& id, Dial::Result result);
  void onProofFrame(const MemberId& id, const std::string& payload);
  void claim(const MemberId& id, const ConnectionQuestion& question);
  void onProved(const MemberId& id, const ViewName& by);
  void renewConnections();
  void closeOutgoing(Peer& peer);
  void onOutgoingEnd(const MemberId& id);
  Clock::time_point proveBy() const;
  bool isLostUnproved(const Peer& peer) const;
  void onProbed(const MemberId& id, const ProbeAnswer& answer);

  EventLoop& loop_;
  Nonce nonce_;
  MemberKeys keys_;
  const Incarnation incarnation_ = Incarnation::random();
  const Duration limit_;
  const std::shared_ptr<const Events> events_;
  std::shared_ptr<Listener> listener_;
  Member self_;
  std::map<MemberId, Peer> peers_;
  std::map<uint64_t, Incoming> incoming_;
  uint64_t next_incoming_ = 1;
  std::vector<MemberId> unflushed_;
  bool finishing_ = false;
};

}  // namespace torchft_ext
