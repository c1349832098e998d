#include "host/socket_member_prober.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <memory>
#include <thread>

#include "connection_support.h"
#include "net_support.h"

namespace torchft_ext {
namespace {

constexpr Duration kLimit = milliseconds(200);

// As one that was stopped: what it asked before is answered, and closed, while it does not run.
TEST(SocketMemberProber, DoesNotTakeItsOwnStallForAHostThatCannotBeReached) {
  TestLoop test;
  net_test::RawAcceptor acceptor;
  MemberRecord member;
  member.incarnation = Incarnation::random();
  member.addresses = {acceptor.address()};
  MemberProberOptions options;
  options.heartbeat_limit = kLimit;
  const auto prober = makeSocketMemberProber(test.loop(), options);
  prober->watch({member});
  {
    net_test::RawPeer first = acceptor.accept();
    first.readBytes(1);  // it has been asked
    const auto stands = std::make_shared<std::promise<void>>();
    test.loop().post([stands] {
      stands->set_value();
      std::this_thread::sleep_for(2 * kLimit);
    });
    stands->get_future().wait();
  }
  const net_test::RawPeer second =
      acceptor.accept();  // asked again, after what was to be said of the first
  const auto updates = prober->updates();
  EXPECT_TRUE(std::none_of(updates.begin(), updates.end(), [](const MemberProber::Report& report) {
    return report.liveness == Liveness::kUnreachable;
  }));
}

}  // namespace
}  // namespace torchft_ext
