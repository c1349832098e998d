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
  // Incarnation and channels of the higher ranks, which connect to us.
  std::vector<Incarnation> incarnations;
  std::vector<std::array<bool, kChannels>> taken;
  int rank = 0;
  std::vector<std::unique_ptr<Connector>> connectors;

  bool allHaveCome() const {
    return std::all_of(taken.begin() + rank + 1, taken.end(), [](const auto& channels) {
      return std::all_of(channels.begin(), channels.end(), [](bool came) { return came; });
    });
  }

  bool admit(Arrival& arrival) {
    const bool expected = arrival.rank > rank &&
                          arrival.rank < static_cast<int>(incarnations.size()) &&
                          arrival.channel >= 0 && arrival.channel < kChannels;
    if (!expected) return false;
    const auto index = static_cast<size_t>(arrival.rank);
    if (incarnations[index] != arrival.from) return false;
    bool& taken_channel = taken[index][static_cast<size_t>(arrival.channel)];
    if (taken_channel) return false;
    taken_channel = true;
    callbacks.arrived(arrival.rank, static_cast<Channel>(arrival.channel), std::move(arrival.fd));
    return true;
  }
};

namespace {

Hello helloTo(const Roster& roster, int self, int peer, int channel) {
  Hello hello;
  hello.nonce = roster.nonce;
  hello.proof = roster.secret.connector;
  hello.from = roster.members[static_cast<size_t>(self)].incarnation;
  hello.to = roster.members[static_cast<size_t>(peer)].incarnation;
  hello.rank = self;
  hello.channel = static_cast<uint8_t>(channel);
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
    const std::vector<SocketAddress> addresses =
        local_sockets ? member.addresses : withoutLocal(member.addresses);
    for (int channel = 0; channel < kChannels; ++channel) {
      auto done = [weak, peer, channel](Connector::Result result) {
        auto impl = weak.lock();
        if (!impl) return;
        if (result.fd) {
          impl->callbacks.arrived(peer, static_cast<Channel>(channel), std::move(result.fd));
        } else if (result.starved) {
          impl->callbacks.starved(result.error);
        } else {
          impl->callbacks.failed(peer, result.error, result.timed_out);
        }
      };
      impl_->connectors.push_back(std::make_unique<Connector>(
          loop, addresses, helloTo(roster, rank, peer, channel),
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
