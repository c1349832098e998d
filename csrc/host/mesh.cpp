#include "host/mesh.h"

#include <algorithm>
#include <array>
#include <utility>

#include "net/local_address.h"

namespace torchft_ext {

struct Mesh::Impl {
  std::shared_ptr<Listener> listener;
  Nonce nonce;
  Callbacks callbacks;
  // Incarnation and lanes of the higher ranks, which connect to us.
  std::vector<Incarnation> incarnations;
  std::vector<std::array<bool, kLanes>> taken;
  int rank = 0;
  std::vector<std::unique_ptr<Connector>> connectors;

  bool allHaveCome() const {
    return std::all_of(taken.begin() + rank + 1, taken.end(), [](const auto& lanes) {
      return std::all_of(lanes.begin(), lanes.end(), [](bool came) { return came; });
    });
  }

  bool admit(Arrival& arrival) {
    const bool expected = arrival.rank > rank &&
                          arrival.rank < static_cast<int>(incarnations.size()) &&
                          arrival.lane >= 0 && arrival.lane < kLanes;
    if (!expected) return false;
    const auto index = static_cast<size_t>(arrival.rank);
    if (incarnations[index] != arrival.from) return false;
    bool& taken_lane = taken[index][static_cast<size_t>(arrival.lane)];
    if (taken_lane) return false;
    taken_lane = true;
    callbacks.arrived(arrival.rank, static_cast<Lane>(arrival.lane), std::move(arrival.fd));
    return true;
  }
};

namespace {

Hello helloTo(const Roster& roster, int self, int peer, int lane) {
  Hello hello;
  hello.nonce = roster.nonce;
  hello.proof = roster.secret.connector;
  hello.from = roster.members[static_cast<size_t>(self)].incarnation;
  hello.to = roster.members[static_cast<size_t>(peer)].incarnation;
  hello.rank = self;
  hello.lane = static_cast<uint8_t>(lane);
  return hello;
}

}  // namespace

Mesh::Mesh(EventLoop& loop, std::shared_ptr<Listener> listener, const Roster& roster, int rank,
           bool local_sockets, Deadline deadline, Callbacks callbacks)
    : impl_(std::make_shared<Impl>()) {
  impl_->listener = std::move(listener);
  impl_->nonce = roster.nonce;
  impl_->callbacks = std::move(callbacks);
  impl_->rank = rank;
  for (const MemberRecord& member : roster.members)
    impl_->incarnations.push_back(member.incarnation);
  impl_->taken.resize(roster.members.size());

  const std::weak_ptr<Impl> weak = impl_;
  for (int peer = 0; peer < rank; ++peer) {
    const MemberRecord& member = roster.members[static_cast<size_t>(peer)];
    const std::vector<SocketAddress> doors =
        local_sockets ? member.addresses : withoutLocal(member.addresses);
    for (int lane = 0; lane < kLanes; ++lane) {
      auto done = [weak, peer, lane](Connector::Result result) {
        auto impl = weak.lock();
        if (!impl) return;
        if (result.fd) {
          impl->callbacks.arrived(peer, static_cast<Lane>(lane), std::move(result.fd));
        } else if (result.starved) {
          impl->callbacks.starved(result.error);
        } else {
          impl->callbacks.failed(peer, result.error, result.timed_out);
        }
      };
      impl_->connectors.push_back(std::make_unique<Connector>(
          loop, doors, helloTo(roster, rank, peer, lane),
          Welcome{roster.secret.acceptor, member.incarnation}, deadline, std::move(done)));
    }
  }
  impl_->listener->expect(
      roster.nonce, roster.secret,
      [weak](Arrival& arrival) {
        auto impl = weak.lock();
        return impl && impl->admit(arrival);
      },
      [weak](const std::string& why) {
        const auto impl = weak.lock();
        if (impl && !impl->allHaveCome()) impl->callbacks.starved(why);
      });
}

Mesh::~Mesh() {
  impl_->listener->forget(impl_->nonce);
}

}  // namespace torchft_ext
