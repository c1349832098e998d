// Stores that end while they are being connected to.
#include "c10d/store/store_adapter.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <string>
#include <thread>
#include <vector>

#include "cpp/support/wait_for.h"
#include "net/socket_address.h"

namespace torchft_ext {
namespace {

// As a server that is killed once its kernel has accepted the first connection.
TEST(StoreAdapter, AServerThatEndsBetweenTheLookAtItAndTheConnectionIsLostSoon) {
  std::string error;
  auto listening = listenOn(*SocketAddress::fromNumeric("127.0.0.1", 0), {}, &error);
  ASSERT_TRUE(listening) << error;
  const StoreAddress address{"127.0.0.1", listening->address.port(), "run"};
  std::thread server([&listening] {
    pollfd wanted{listening->fd.get(), POLLIN, 0};
    EXPECT_EQ(::poll(&wanted, 1, 60'000), 1);
    listening->fd.reset();
  });
  const auto thread = storeThreadFor(address);
  const Deadline late = Deadline::after(kTestPatience / 3);
  const StoreReply reply =
      thread->set("a", "1", Deadline::after(2 * kTestPatience), [] { return false; });
  server.join();
  EXPECT_EQ(reply.status, StoreStatus::kLost) << reply.error;
  EXPECT_FALSE(late.expired());
}

// Addresses 10.0.0.1, 10.0.0.2 and so on, and what becomes of a try at each: empty: an answer.
std::string tryAll(const std::vector<std::string>& outcomes) {
  std::vector<SocketAddress> addresses;
  for (size_t i = 1; i <= outcomes.size(); ++i)
    addresses.push_back(*SocketAddress::fromNumeric("10.0.0." + std::to_string(i), 1));
  size_t tries = 0;
  return tryEach(addresses, [&](const SocketAddress& address) {
    EXPECT_EQ(address, addresses[tries]);
    const std::string& outcome = outcomes[tries++];
    if (outcome == "lacks") throw StoreShortage(outcome);
    return outcome;
  });
}

TEST(StoreAdapter, AllAddressesOfAHostAreTriedBeforeAShortageIsReported) {
  EXPECT_EQ(tryAll({"lacks", ""}), "");
  EXPECT_EQ(tryAll({"lacks", "refused", ""}), "");
  EXPECT_THROW(tryAll({"lacks", "lacks"}), StoreShortage);
}

TEST(StoreAdapter, AServerThatRefusesIsNoShortageThoughAnotherAddressLacks) {
  EXPECT_EQ(tryAll({"lacks", "refused"}), "refused");
  EXPECT_EQ(tryAll({"refused", "lacks"}), "refused");
}

}  // namespace
}  // namespace torchft_ext
