#include "host/probe_vigil.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <memory>
#include <thread>

#include "link_support.h"
#include "net_support.h"

namespace torchft_ext {
namespace {

constexpr Duration kLimit = milliseconds(200);

// As one that was stopped: what it asked before is answered, and closed, while it does not run.
TEST(ProbeVigil, DoesNotTakeItsOwnStandstillForAHostThatCannotBeReached) {
  TestLoop test;
  net_test::RawAcceptor door;
  MemberRecord member;
  member.incarnation = Incarnation::random();
  member.addresses = {door.address()};
  VigilOptions options;
  options.heartbeat_limit = kLimit;
  const auto vigil = makeProbeVigil(test.loop(), options);
  vigil->watch({member});
  {
    net_test::RawPeer first = door.accept();
    first.readBytes(1);  // it has been asked
    const auto stands = std::make_shared<std::promise<void>>();
    test.loop().post([stands] {
      stands->set_value();
      std::this_thread::sleep_for(2 * kLimit);
    });
    stands->get_future().wait();
  }
  const net_test::RawPeer second =
      door.accept();  // asked again, after what was to be said of the first
  const auto news = vigil->news();
  EXPECT_TRUE(std::none_of(news.begin(), news.end(), [](const Vigil::Report& report) {
    return report.sight == Vigil::Sight::kUnreachable;
  }));
}

}  // namespace
}  // namespace torchft_ext
