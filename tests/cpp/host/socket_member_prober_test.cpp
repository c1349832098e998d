#include "host/socket_member_prober.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <map>
#include <memory>
#include <thread>

#include "cpp/host/connection_support.h"
#include "cpp/support/net_support.h"

namespace torchft_ext {
namespace {

constexpr Duration kLimit = milliseconds(200);

MemberRecord memberAt(const SocketAddress& address,
                      const Incarnation& incarnation = Incarnation::random()) {
  MemberRecord member;
  member.incarnation = incarnation;
  member.addresses = {address};
  return member;
}

MemberProberOptions optionsOf(const Incarnation& self = Incarnation::random()) {
  MemberProberOptions options;
  options.self = self;
  options.heartbeat_limit = kLimit;
  return options;
}

// The next so many.
std::vector<MemberProber::Report> awaitReports(MemberProber& prober, size_t count) {
  std::vector<MemberProber::Report> reports;
  EXPECT_TRUE(waitFor([&] {
    for (MemberProber::Report& report : prober.updates()) reports.push_back(std::move(report));
    return reports.size() >= count;
  }));
  return reports;
}

TEST(SocketMemberProber, TellsHowEachMemberAnswers) {
  TestLoop test;
  net_test::Acceptor alive;
  const net_test::RawAcceptor silent;
  auto gone = std::make_unique<net_test::RawAcceptor>();
  const std::vector members{memberAt(alive.address(), selfIncarnation()), memberAt(gone->address()),
                            memberAt(silent.address()),
                            memberAt(*SocketAddress::fromNumeric("127.255.255.255", 4000))};
  gone.reset();
  const auto prober = makeSocketMemberProber(test.loop(), optionsOf());
  prober->watch(members);
  std::map<Incarnation, Liveness> seen;
  for (const auto& report : awaitReports(*prober, members.size()))
    EXPECT_TRUE(seen.emplace(report.incarnation, report.liveness).second) << "told twice";
  EXPECT_EQ(seen.at(members[0].incarnation), Liveness::kAlive);
  EXPECT_EQ(seen.at(members[1].incarnation), Liveness::kGone);
  EXPECT_EQ(seen.at(members[2].incarnation), Liveness::kSilent);
  EXPECT_EQ(seen.at(members[3].incarnation), Liveness::kUnreachable);
}

TEST(SocketMemberProber, TellsThatASilentMemberAnswersAgain) {
  TestLoop test;
  net_test::RawAcceptor acceptor;
  const auto prober = makeSocketMemberProber(test.loop(), optionsOf());
  prober->watch({memberAt(acceptor.address())});
  const net_test::RawPeer first = acceptor.accept();
  EXPECT_EQ(awaitReports(*prober, 1).front().liveness, Liveness::kSilent);
  net_test::RawPeer second = acceptor.accept();
  second.say(encodeRefusal({RefusalCode::kUnknownGeneration, "it lives"}));
  EXPECT_EQ(awaitReports(*prober, 1).front().liveness, Liveness::kAlive);
}

TEST(SocketMemberProber, AsksTheNextPortWhereOneSaysNothing) {
  TestLoop test;
  net_test::Acceptor alive;
  MemberRecord member = memberAt(*SocketAddress::fromNumeric("127.255.255.255", 4000));
  member.incarnation = selfIncarnation();
  member.addresses.push_back(alive.address());
  const auto prober = makeSocketMemberProber(test.loop(), optionsOf());
  prober->watch({member});
  EXPECT_EQ(awaitReports(*prober, 1).front().liveness, Liveness::kAlive);
}

// Rank 0 asks as many as that: 25 ms for each would be 12,000 questions a second.
TEST(SocketMemberProber, AsksSeldomInAWorldOfHundreds) {
  TestLoop test;
  net_test::Acceptor alive;
  MemberProberOptions options = optionsOf();
  options.world = 300;  // every 750 ms
  const auto prober = makeSocketMemberProber(test.loop(), options);
  const auto began = Clock::now();
  prober->watch({memberAt(alive.address(), selfIncarnation())});
  awaitReports(*prober, 1);
  std::this_thread::sleep_for(milliseconds(300));
  const auto periods = static_cast<uint64_t>((Clock::now() - began) / milliseconds(750));
  EXPECT_LE(alive.listener->counts().accepted, 1 + periods);
}

TEST(SocketMemberProber, OneThatIsDestroyedClosesTheConnectionUnderWay) {
  TestLoop test;
  net_test::RawAcceptor acceptor;
  MemberProberOptions patient = optionsOf();
  patient.heartbeat_limit = Duration(0);  // for as long as it takes
  auto prober = makeSocketMemberProber(test.loop(), patient);
  prober->watch({memberAt(acceptor.address())});
  net_test::RawPeer peer = acceptor.accept();
  prober.reset();
  peer.readToEnd();
}

// As one that was stopped: what it asked before is answered, and closed, while it does not run.
TEST(SocketMemberProber, DoesNotTakeItsOwnStallForAHostThatCannotBeReached) {
  TestLoop test;
  net_test::RawAcceptor acceptor;
  const auto prober = makeSocketMemberProber(test.loop(), optionsOf());
  prober->watch({memberAt(acceptor.address())});
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
