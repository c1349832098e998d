#include "net/socket_address.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <cstring>

#include "cpp/support/wait_for.h"
#include "net/local_address.h"

namespace torchft_ext {
namespace {

SocketAddress loopback(uint16_t port = 0) {
  return *SocketAddress::fromNumeric("127.0.0.1", port);
}

bool becomesReady(int fd, short events) {
  pollfd entry{fd, events, 0};
  return ::poll(&entry, 1, static_cast<int>(milliseconds(kTestPatience).count())) == 1;
}

TEST(SocketAddress, TextReadsBack) {
  for (const char* text :
       {"10.0.0.1:80", "255.255.255.255:65535", "[::1]:0", "[fe80::1%lo]:7000", "unix:a-Z-09"}) {
    const auto address = SocketAddress::parse(text);
    ASSERT_TRUE(address) << text;
    EXPECT_EQ(address->toString(), text);
  }
}

TEST(SocketAddress, RefusesMalformedText) {
  for (const char* text : {"",
                           ":",
                           "10.0.0.1",
                           "10.0.0.1:",
                           "10.0.0.1:65536",
                           "10.0.0.1:-1",
                           "10.0.0.1:8x",
                           "10.0.0:80",
                           "::1:80",
                           "[::1]",
                           "[::1:80",
                           "[10.0.0.1]:80",
                           "localhost:80",
                           "[fe80::1%nosuchinterface]:80",
                           "[fe80::1%]:80",
                           "unix:",
                           "unix",
                           "unix:/run/socket",
                           "unix:a b",
                           "unix:a\n",
                           "UNIX:a"}) {
    EXPECT_FALSE(SocketAddress::parse(text)) << text;
  }
  EXPECT_TRUE(SocketAddress::parse("unix:" + std::string(64, 'a')));
  EXPECT_FALSE(SocketAddress::parse("unix:" + std::string(65, 'a')));
  EXPECT_FALSE(SocketAddress::parse(std::string("unix:a\0b", 8)));
}

TEST(SocketAddress, ALocalOneHasANameAndNothingElse) {
  const SocketAddress address = *SocketAddress::fromLocalName("name");
  EXPECT_TRUE(address.isLocal());
  EXPECT_EQ(address.localName(), "name");
  EXPECT_EQ(address.ip(), "");
  EXPECT_EQ(address.port(), 0);
  EXPECT_FALSE(address.isLoopback());
  EXPECT_FALSE(address == *SocketAddress::fromLocalName("name2"));
  EXPECT_FALSE(loopback().isLocal());
  EXPECT_EQ(loopback().localName(), "");
}

// The kernel's names of sockets that others have made, and of those without a name.
TEST(SocketAddress, AUnixSocketThatIsNotOursHasNoName) {
  const UniqueFd unnamed(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(localAddressOfSocket(unnamed.get())->toString(), "unix:");
  sockaddr_storage foreign{};
  foreign.ss_family = AF_UNIX;
  const char name[] = "\0org.example.service";
  std::memcpy(reinterpret_cast<char*>(&foreign) + sizeof(sa_family_t), name, sizeof(name));
  EXPECT_EQ(SocketAddress(reinterpret_cast<const sockaddr*>(&foreign), sizeof(foreign)).toString(),
            "unix:");
}

TEST(SocketAddress, NumericTakesBracketsOrNone) {
  EXPECT_EQ(SocketAddress::fromNumeric("::1", 5)->toString(), "[::1]:5");
  EXPECT_EQ(SocketAddress::fromNumeric("[::1]", 5)->toString(), "[::1]:5");
  EXPECT_FALSE(SocketAddress::fromNumeric("example.org", 5));
}

TEST(SocketAddress, PortCanBeChanged) {
  auto address = loopback(1);
  address.setPort(40000);
  EXPECT_EQ(address.port(), 40000);
  EXPECT_EQ(address.ip(), "127.0.0.1");
}

TEST(SocketAddress, KnowsLoopback) {
  EXPECT_TRUE(loopback().isLoopback());
  EXPECT_TRUE(SocketAddress::fromNumeric("127.8.8.8", 1)->isLoopback());
  EXPECT_TRUE(SocketAddress::fromNumeric("::1", 1)->isLoopback());
  EXPECT_TRUE(SocketAddress::fromNumeric("::ffff:127.0.0.1", 1)->isLoopback());
  EXPECT_FALSE(SocketAddress::fromNumeric("10.0.0.1", 1)->isLoopback());
  EXPECT_FALSE(SocketAddress().isLoopback());
}

TEST(PortRange, ReadsRangesAndSinglePorts) {
  EXPECT_EQ(PortRange::parse("7000-7100")->first, 7000);
  EXPECT_EQ(PortRange::parse("7000-7100")->last, 7100);
  EXPECT_EQ(PortRange::parse("7000")->last, 7000);
  EXPECT_EQ(PortRange::parse("")->last, 0);
  EXPECT_EQ(PortRange::parse("0")->last, 0);
}

TEST(PortRange, SaysWhatItHolds) {
  EXPECT_EQ(PortRange{}.toString(), "any port");
  EXPECT_EQ(PortRange::parse("7000")->toString(), "port 7000");
  EXPECT_EQ(PortRange::parse("7000-7100")->toString(), "ports 7000 to 7100");
}

TEST(PortRange, RefusesMalformedOrReversed) {
  for (const char* text :
       {"7100-7000", "7000-", "-7000", "a", "7000-65536", "0-5", "1-2-3", " 7000"}) {
    EXPECT_FALSE(PortRange::parse(text)) << text;
  }
}

TEST(Interfaces, LoopbackIsFoundByNamePrefixAndExactly) {
  for (const char* names : {"lo", "=lo", "nosuchinterface,lo"}) {
    const auto address = addressOfInterface(names);
    ASSERT_TRUE(address) << names;
    EXPECT_TRUE(address->isLoopback()) << names;
  }
}

TEST(Interfaces, UnknownNamesYieldNothing) {
  EXPECT_FALSE(addressOfInterface("nosuchinterface"));
  EXPECT_FALSE(addressOfInterface("=l"));
  EXPECT_FALSE(addressOfInterface(""));
}

TEST(Interfaces, ExcludedOneIsNotChosen) {
  const auto address = addressOfInterface("^lo");
  EXPECT_TRUE(!address || !address->isLoopback());
}

TEST(Interfaces, AddressTowardsLoopbackIsLoopback) {
  const auto address = localAddressTowards("127.0.0.1", 9);
  ASSERT_TRUE(address);
  EXPECT_EQ(address->toString(), "127.0.0.1:0");
}

TEST(Sockets, ListenConnectAccept) {
  std::string error;
  const auto listening = listenOn(loopback(), {}, &error);
  ASSERT_TRUE(listening) << error;
  EXPECT_NE(listening->address.port(), 0);
  EXPECT_FALSE(acceptOne(listening->fd.get()));

  const UniqueFd connected = startConnect(listening->address, &error);
  ASSERT_TRUE(connected) << error;
  ASSERT_TRUE(becomesReady(connected.get(), POLLOUT));
  EXPECT_EQ(pendingSocketError(connected.get()), 0);
  ASSERT_TRUE(becomesReady(listening->fd.get(), POLLIN));
  EXPECT_TRUE(acceptOne(listening->fd.get()));
}

TEST(LocalAddress, IsReachableFromHereAndNowhereElse) {
  const auto address = newLocalAddress();
  ASSERT_TRUE(address);
  EXPECT_TRUE(isReachableFromHere(*address));
  EXPECT_TRUE(isReachableFromHere(loopback(80)));
  EXPECT_FALSE(*address == *newLocalAddress());
  std::string elsewhere = address->localName();
  elsewhere[0] = elsewhere[0] == '0' ? '1' : '0';
  EXPECT_FALSE(isReachableFromHere(*SocketAddress::fromLocalName(elsewhere)));
  EXPECT_FALSE(isReachableFromHere(*SocketAddress::fromLocalName("a")));
}

TEST(LocalAddress, ListensConnectsAndAccepts) {
  std::string error;
  const SocketAddress address = *newLocalAddress();
  auto listening = listenOn(address, {}, &error);
  ASSERT_TRUE(listening) << error;
  EXPECT_EQ(listening->address, address);
  EXPECT_FALSE(listenOn(address, {}, &error)) << "a name is one socket's";
  EXPECT_NE(error.find(address.toString()), std::string::npos) << error;
  const UniqueFd connected = startConnect(address, &error);
  ASSERT_TRUE(connected) << error;
  ASSERT_TRUE(becomesReady(listening->fd.get(), POLLIN));
  EXPECT_TRUE(acceptOne(listening->fd.get()));
  listening->fd.reset();
  EXPECT_FALSE(startConnect(address, &error)) << "nobody listens any more";
  EXPECT_NE(error.find("refused"), std::string::npos) << error;
}

TEST(Sockets, ConnectToAPortWhereNobodyListensIsRefused) {
  // Bound, so that nobody else takes the port meanwhile, but not listening.
  const UniqueFd holder(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::bind(holder.get(), loopback().raw(), loopback().rawLength()), 0);
  std::string error;
  const UniqueFd fd = startConnect(*localAddressOfSocket(holder.get()), &error);
  if (!fd) {
    EXPECT_NE(error.find("refused"), std::string::npos) << error;
    return;
  }
  ASSERT_TRUE(becomesReady(fd.get(), POLLOUT));
  EXPECT_EQ(pendingSocketError(fd.get()), ECONNREFUSED);
}

TEST(Sockets, TakenPortIsSkippedInARange) {
  std::string error;
  const auto taken = listenOn(loopback(), {}, &error);
  ASSERT_TRUE(taken) << error;
  const uint16_t port = taken->address.port();
  EXPECT_FALSE(listenOn(loopback(), {port, port}, &error));
  EXPECT_NE(error.find(std::to_string(port)), std::string::npos) << error;
  if (port > 65000) return;
  const auto next = listenOn(loopback(), {port, static_cast<uint16_t>(port + 500)}, &error);
  ASSERT_TRUE(next) << error;
  EXPECT_GT(next->address.port(), port);
}

TEST(Sockets, ForeignAddressCannotBeListenedOn) {
  std::string error;
  EXPECT_FALSE(listenOn(*SocketAddress::fromNumeric("192.0.2.1", 0), {}, &error));
  EXPECT_NE(error.find("192.0.2.1"), std::string::npos) << error;
}

}  // namespace
}  // namespace torchft_ext
