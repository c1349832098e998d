// A generation whose rank 0 is a host engine and whose other ranks are played by the test.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "cpp/comm/cluster.h"
#include "cpp/support/net_support.h"
#include "net/handshake.h"

namespace torchft_ext {

class PlayedMembers : public testing::Test {
 protected:
  // All played ranks have that one port, a local address of another host, and no liveness
  // connections.
  explicit PlayedMembers(int size = 2,
                         std::shared_ptr<Engine> engine = std::get<std::shared_ptr<Engine>>(
                             makeHostEngineForTest(loopbackOptions())))
      : engine_(std::move(engine)) {
    roster_.nonce = Nonce::random();
    roster_.secret = GenerationSecret::random();
    roster_.members = {std::get<MemberRecord>(engine_->describeSelf())};
    while (static_cast<int>(roster_.members.size()) < size) {
      MemberRecord played;
      played.incarnation = Incarnation::random();
      played.host = "elsewhere";
      played.pid = 4711;
      played.addresses = {*SocketAddress::fromLocalName("elsewhere"), acceptor_->address()};
      roster_.members.push_back(played);
    }
  }

  // Both channels of that rank, admitted: collective, control.
  std::vector<net_test::RawPeer> connect(int rank = 1) {
    const MemberRecord& played = roster_.members[static_cast<size_t>(rank)];
    const MemberRecord& real = roster_.members[0];
    std::vector<net_test::RawPeer> channels;
    for (uint8_t channel = 0; channel < 2; ++channel) {
      channels.emplace_back(real.addresses.front());
      channels.back().say(encodeHello({roster_.nonce, roster_.secret.connector, played.incarnation,
                                       real.incarnation, rank, channel}));
      const std::string welcome = encodeWelcome({roster_.secret.acceptor, real.incarnation});
      EXPECT_EQ(channels.back().readBytes(welcome.size()), welcome);
    }
    return channels;
  }

  static std::string frame(FrameType type, const std::string& payload = {}) {
    FrameHeader header;
    header.type = type;
    header.length = payload.size();
    const FrameBytes bytes = encodeHeader(header);
    return std::string(bytes.begin(), bytes.end()) + payload;
  }

  std::shared_ptr<Engine> engine_;
  std::optional<net_test::RawAcceptor> acceptor_{std::in_place};
  Roster roster_;
};

}  // namespace torchft_ext
