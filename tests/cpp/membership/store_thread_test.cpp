#include "membership/store_thread.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <optional>
#include <stdexcept>
#include <thread>

#include "base/threads.h"
#include "cpp/membership/memory_store.h"

namespace torchft_ext {
namespace {

constexpr std::chrono::seconds kPatience{30};

Deadline soon() {
  return Deadline::after(kPatience);
}

bool eventually(const std::function<bool()>& condition) {
  const Deadline deadline = soon();
  while (!condition()) {
    if (deadline.expired()) return false;
    std::this_thread::yield();
  }
  return true;
}

// Posts a call and walks away from it once it hangs inside the server, which the caller has told to
// hang.
void leaveAHangingCall(StoreThread& store, MemoryStore& server) {
  const Cancelled once_inside = [&server] { return server.held() > 0; };
  EXPECT_EQ(store.set("hanging", "1", soon(), once_inside).status, StoreStatus::kCancelled);
  EXPECT_EQ(server.held(), 1);
}

struct StoreThreadTest : testing::Test {
  std::shared_ptr<MemoryStore> server = std::make_shared<MemoryStore>();
  std::shared_ptr<StoreThread> store =
      std::make_shared<StoreThread>("memory", server->factory("p"));

  // Threads that an earlier test in this process left in a hanging call have ended by then.
  void SetUp() override {
    eventually([] { return threadSnapshot().stuck == 0; });
  }
  ~StoreThreadTest() override { server->release(); }
  StoreStatus set(const std::string& key, const std::string& value) {
    return store->set(key, value, soon(), nullptr).status;
  }
};

TEST_F(StoreThreadTest, SetsAndGetsWithOneClient) {
  EXPECT_EQ(set("a", "1"), StoreStatus::kOk);
  EXPECT_EQ(set("b", "2"), StoreStatus::kOk);
  const auto reply = store->getAll({"a", "b"}, soon(), nullptr);
  EXPECT_EQ(reply.status, StoreStatus::kOk);
  EXPECT_EQ(reply.values, (std::vector<std::string>{"1", "2"}));
  EXPECT_EQ(server->use("p").clients, 1);
  EXPECT_EQ(server->use("p").calls(), 3);
}

TEST_F(StoreThreadTest, AMissingKeyGivesNoValues) {
  set("a", "1");
  const auto reply = store->getAll({"a", "b"}, soon(), nullptr);
  EXPECT_EQ(reply.status, StoreStatus::kOk);
  EXPECT_TRUE(reply.values.empty());
}

TEST_F(StoreThreadTest, AwaitsKeysThatComeLater) {
  auto waiting = std::async(std::launch::async, [&] {
    return store->awaitAll({"a", "b"}, soon(), nullptr);
  });
  ASSERT_TRUE(eventually([&] { return server->use("p").looks >= 3; }));
  server->put("a", "1");
  server->put("b", "2");
  EXPECT_EQ(waiting.get().values, (std::vector<std::string>{"1", "2"}));
}

TEST_F(StoreThreadTest, AwaitsAnAcceptableValue) {
  server->put("a", "old");
  auto waiting = std::async(std::launch::async, [&] {
    return store->awaitWhere(
        {"a"}, [](const auto& values) { return values[0] == "new"; }, soon(), nullptr);
  });
  ASSERT_TRUE(eventually([&] { return server->use("p").looks >= 2; }));
  server->put("a", "new");
  EXPECT_EQ(waiting.get().values, std::vector<std::string>{"new"});
}

TEST_F(StoreThreadTest, AWaitingCallerDoesNotHoldUpAnother) {
  std::atomic<bool> cancel{false};
  auto waiting = std::async(std::launch::async, [&] {
    return store->awaitAll({"never"}, soon(), [&] { return cancel.load(); });
  });
  ASSERT_TRUE(eventually([&] { return server->use("p").looks >= 2; }));
  EXPECT_EQ(set("a", "1"), StoreStatus::kOk);
  cancel = true;
  EXPECT_EQ(waiting.get().status, StoreStatus::kCancelled);
}

TEST_F(StoreThreadTest, ATimeoutNamesTheKeys) {
  const auto reply = store->awaitAll({"x", "y"}, Deadline::after(milliseconds(10)), nullptr);
  EXPECT_EQ(reply.status, StoreStatus::kTimedOut);
  EXPECT_NE(reply.error.find("'x', 'y'"), std::string::npos) << reply.error;
  EXPECT_NE(reply.error.find("memory"), std::string::npos) << reply.error;
}

TEST_F(StoreThreadTest, PollsLessAndLessOften) {
  // Pauses of 0.1, 0.2 ... 5 ms: at most 7 looks in the first 11.3 ms and one each 5 ms after.
  const auto began = Clock::now();
  store->awaitAll({"never"}, Deadline::after(milliseconds(200)), nullptr);
  const auto took = std::chrono::duration_cast<milliseconds>(Clock::now() - began).count();
  EXPECT_GT(server->use("p").looks, 1);
  EXPECT_LE(server->use("p").looks, 8 + took / 5);
}

TEST_F(StoreThreadTest, ACancelledCallerLeavesAHangingCall) {
  server->block();
  leaveAHangingCall(*store, *server);
}

TEST_F(StoreThreadTest, AnExceptionOfThePredicateLeavesTheCall) {
  const Cancelled interrupted = []() -> bool { throw std::runtime_error("a signal"); };
  EXPECT_THROW(store->awaitAll({"never"}, soon(), interrupted), std::runtime_error);
  EXPECT_EQ(set("a", "1"), StoreStatus::kOk);
}

TEST_F(StoreThreadTest, AHangingCallIsBoundedByTheCallersDeadline) {
  server->block();
  const auto reply = store->set("a", "1", Deadline::after(milliseconds(20)), nullptr);
  EXPECT_EQ(reply.status, StoreStatus::kTimedOut);
}

TEST_F(StoreThreadTest, AStuckCallDoesNotHoldUpTheNextCallerForGood) {
  const int stuck_before = threadSnapshot().stuck;
  server->blockNext();
  leaveAHangingCall(*store, *server);
  EXPECT_EQ(set("b", "2"), StoreStatus::kOk);  // once the first call has been stuck for kStuckAfter
  EXPECT_EQ(server->use("p").clients, 1);      // the first client was still being made
  EXPECT_EQ(threadSnapshot().stuck, stuck_before + 1);
  server->release();
  EXPECT_TRUE(eventually([&] { return threadSnapshot().stuck == stuck_before; }));
}

TEST_F(StoreThreadTest, AFrozenServerCostsABoundedNumberOfThreads) {
  const int stuck_before = threadSnapshot().stuck;
  server->block();
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(200) +
                                            (StoreThread::kMostStuck + 1) *
                                                (StoreThread::kStuckAfter + milliseconds(20)));
  while (!deadline.expired()) store->set("a", "1", Deadline::after(milliseconds(10)), nullptr);
  EXPECT_GT(threadSnapshot().stuck, stuck_before);
  EXPECT_LE(threadSnapshot().stuck - stuck_before, StoreThread::kMostStuck);
  server->release();
  EXPECT_TRUE(eventually([&] { return threadSnapshot().stuck == stuck_before; }));
  EXPECT_EQ(set("b", "2"), StoreStatus::kOk);
}

TEST_F(StoreThreadTest, AnErrorOfTheStoreIsReportedWithItsText) {
  server->fail("no route to host");
  const auto reply = store->set("a", "1", soon(), nullptr);
  EXPECT_EQ(reply.status, StoreStatus::kLost);
  EXPECT_NE(reply.error.find("no route to host"), std::string::npos);
  server->mend();
  EXPECT_EQ(set("a", "1"), StoreStatus::kOk);
}

TEST_F(StoreThreadTest, AStaleClientIsReplacedWithoutTheCallerNoticing) {
  set("a", "1");
  server->failNext(1);
  EXPECT_EQ(set("b", "2"), StoreStatus::kOk);
  EXPECT_EQ(server->use("p").clients, 2);
}

TEST_F(StoreThreadTest, SetAllWritesEveryPairOnceInOrder) {
  EXPECT_EQ(store->setAll({{"a", "1"}, {"b", "2"}, {"a", "3"}}, soon(), nullptr).status,
            StoreStatus::kOk);
  EXPECT_EQ(server->peek("a"), "3");
  EXPECT_EQ(server->peek("b"), "2");
  EXPECT_EQ(server->use("p").sets, 3);
  EXPECT_EQ(store->setAll({}, soon(), nullptr).status, StoreStatus::kOk);
}

TEST_F(StoreThreadTest, ARemovalComesBeforeALaterSetOfTheSameKey) {
  std::vector<std::string> keys;
  for (int i = 0; i < 50; ++i) keys.push_back(std::to_string(i));
  for (const auto& key : keys) server->put(key, "old");
  store->removeLater(keys);
  EXPECT_EQ(set("49", "new"), StoreStatus::kOk);
  EXPECT_EQ(server->peek("49"), "new");
  EXPECT_EQ(server->size(), 1U);
}

TEST_F(StoreThreadTest, RemovalsAreDoneThoughTheOwnerIsGone) {
  server->put("a", "1");
  store->removeLater({"a"});
  store.reset();
  EXPECT_TRUE(eventually([&] { return server->size() == 0; }));
}

TEST_F(StoreThreadTest, AnEditForLaterWaitsAndIsDoneThoughTheOwnerIsGone) {
  constexpr milliseconds kLater{50};
  server->put("a", "1");
  const auto began = Clock::now();
  store->editLater(
      "a", [](const auto&, const auto&) { return std::string(); }, {}, kLater);
  store.reset();
  EXPECT_TRUE(eventually([&] { return server->size() == 0; }));
  EXPECT_GE(Clock::now() - began, kLater);
}

TEST_F(StoreThreadTest, DestructionDoesNotWaitForAHangingCall) {
  server->block();
  leaveAHangingCall(*store, *server);
  const auto began = Clock::now();
  store.reset();
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(10));
  EXPECT_EQ(server->held(), 1);
}

TEST_F(StoreThreadTest, TheThreadEndsWithItsOwner) {
  ASSERT_TRUE(StoreThread::stopAll(soon()));
  const size_t before = threadSnapshot().running.size();
  auto other = std::make_shared<StoreThread>("memory2", server->factory("q"));
  EXPECT_EQ(threadSnapshot().running.size(), before + 1);
  other.reset();
  EXPECT_TRUE(eventually([&] { return threadSnapshot().running.size() == before; }));
}

TEST(StoreThreadRegistry, OneServerHasOneThreadWhileSomebodyHoldsIt) {
  const auto server = std::make_shared<MemoryStore>();
  auto first = StoreThread::forServer("host:1", server->factory("p"));
  const auto second = StoreThread::forServer("host:1", server->factory("p"));
  const auto elsewhere = StoreThread::forServer("host:2", server->factory("p"));
  EXPECT_EQ(first, second);
  EXPECT_NE(first, elsewhere);
}

TEST(StoreThreadRegistry, StopAllEndsEveryThreadAndReleasesTheirCallers) {
  const auto server = std::make_shared<MemoryStore>();
  const auto store = StoreThread::forServer("host:3", server->factory("p"));
  auto waiting =
      std::async(std::launch::async, [&] { return store->awaitAll({"never"}, soon(), nullptr); });
  ASSERT_TRUE(eventually([&] { return server->use("p").looks >= 1; }));
  EXPECT_TRUE(StoreThread::stopAll(soon()));
  EXPECT_EQ(waiting.get().status, StoreStatus::kLost);
  EXPECT_EQ(store->set("a", "1", soon(), nullptr).status, StoreStatus::kLost);
  EXPECT_NE(StoreThread::forServer("host:3", server->factory("p")), store);
}

TEST(StoreThreadRegistry, StopAllDropsWhatIsForLater) {
  const auto server = std::make_shared<MemoryStore>();
  auto store = StoreThread::forServer("host:5", server->factory("p"));
  server->put("a", "1");
  store->editLater(
      "a", [](const auto&, const auto&) { return std::string(); }, {}, std::chrono::hours(1));
  store.reset();
  EXPECT_TRUE(StoreThread::stopAll(soon()));
  EXPECT_EQ(server->size(), 1U);
}

TEST(StoreThreadRegistry, StopAllDoesNotWaitForAHangingCall) {
  const auto server = std::make_shared<MemoryStore>();
  const auto store = StoreThread::forServer("host:4", server->factory("p"));
  server->block();
  leaveAHangingCall(*store, *server);
  EXPECT_FALSE(StoreThread::stopAll(Deadline::after(milliseconds(20))));
  server->release();
}

// A client that belongs to somebody else, and is lent for as long as that one has it.
struct Lender {
  explicit Lender(MemoryStore& server) : client(server.client("lender")) {}
  LentClient lends(Duration patience = kPatience) const {
    return {[weak = std::weak_ptr(client)] { return weak.lock(); }, patience};
  }
  std::shared_ptr<StoreClient> client;
};

TEST_F(StoreThreadTest, AClientThatIsLentIsUsedAndNoneIsMade) {
  const Lender lender(*server);
  StoreThread borrower("lent", server->factory("own"), lender.lends());
  EXPECT_EQ(borrower.set("a", "1", soon(), nullptr).status, StoreStatus::kOk);
  EXPECT_EQ(borrower.getAll({"a"}, soon(), nullptr).values, std::vector<std::string>{"1"});
  EXPECT_EQ(server->use("own").clients, 0);
  EXPECT_EQ(server->use("lender").calls(), 2);
}

TEST_F(StoreThreadTest, ACallThatHangsInALentClientIsMadeAgainOverItsOwn) {
  const Lender lender(*server);
  StoreThread borrower("lent", server->factory("own"), lender.lends(milliseconds(50)));
  server->blockNext();
  EXPECT_EQ(borrower.set("a", "1", soon(), nullptr).status, StoreStatus::kOk);
  EXPECT_EQ(server->held(), 1) << "the lender's call still hangs";
  EXPECT_EQ(borrower.set("b", "1", soon(), nullptr).status, StoreStatus::kOk);
  EXPECT_EQ(server->use("own").clients, 1);
}

TEST_F(StoreThreadTest, AWaitThatHangsInALentClientEndsByTheAnswerOfItsOwn) {
  const Lender lender(*server);
  StoreThread borrower("lent", server->factory("own"), lender.lends(milliseconds(50)));
  server->blockNext();
  server->put("a", "1");
  EXPECT_EQ(borrower.awaitAll({"a"}, soon(), nullptr).values, std::vector<std::string>{"1"});
}

TEST_F(StoreThreadTest, ALentClientThatIsSlowIsNotReplacedWithinItsLendersPatience) {
  const Lender lender(*server);
  StoreThread borrower("lent", server->factory("own"), lender.lends());
  server->blockNext();
  const Deadline longer_than_stuck = Deadline::after(StoreThread::kStuckAfter + milliseconds(200));
  EXPECT_EQ(borrower.set("a", "1", longer_than_stuck, nullptr).status, StoreStatus::kTimedOut);
  server->release();
  EXPECT_EQ(borrower.set("b", "1", soon(), nullptr).status, StoreStatus::kOk);
  EXPECT_EQ(server->use("own").clients, 0);
}

TEST_F(StoreThreadTest, ALentClientThatHangsIsReplacedWithinHalfOfALaterLimit) {
  const Lender lender(*server);
  const auto borrower =
      std::make_shared<StoreThread>("lent", server->factory("own"), lender.lends());
  const Duration limit = kPatience / 3;
  server->blockNext();
  const StoreLimit attempt(borrower, milliseconds(200));
  EXPECT_EQ(borrower->set("a", "1", Deadline::after(limit), nullptr).status, StoreStatus::kOk);
  EXPECT_EQ(server->held(), 1) << "the lender's call still hangs";
}

TEST_F(StoreThreadTest, ALimitThatIsOverDoesNotCostALentClient) {
  const Lender lender(*server);
  const auto borrower =
      std::make_shared<StoreThread>("lent", server->factory("own"), lender.lends());
  { const StoreLimit over(borrower, milliseconds(200)); }
  server->blockNext();
  const Deadline longer = Deadline::after(milliseconds(400));
  EXPECT_EQ(borrower->set("a", "1", longer, nullptr).status, StoreStatus::kTimedOut);
  EXPECT_EQ(server->use("own").clients, 0);
}

// ---------------------------------------------------------------- writes that come late

struct LateWriteTest : StoreThreadTest {
  // A write that is given up hangs in the server, and another thread has taken its place.
  void giveUpAWrite() {
    stuck_before = threadSnapshot().stuck;
    EXPECT_EQ(set("before", "1"), StoreStatus::kOk);  // so that there is a client
    server->blockNextSet();
    leaveAHangingCall(*store, *server);
    EXPECT_EQ(set("b", "1"), StoreStatus::kOk);
    EXPECT_EQ(threadSnapshot().stuck, stuck_before + 1);
  }
  void itReturns() {
    server->release();
    EXPECT_TRUE(eventually([&] { return threadSnapshot().stuck == stuck_before; }));
  }
  void remove(const std::string& key) {
    store->removeLater({key});
    EXPECT_EQ(set("behind", "1"), StoreStatus::kOk);
  }
  int stuck_before = 0;
};

TEST_F(LateWriteTest, IsRemovedWhereItsKeyWasRemovedMeanwhile) {
  giveUpAWrite();
  remove("hanging");
  itReturns();
  EXPECT_EQ(server->peek("hanging"), std::nullopt);
}

TEST_F(LateWriteTest, GivesWayToALaterOne) {
  giveUpAWrite();
  EXPECT_EQ(set("hanging", "2"), StoreStatus::kOk);
  itReturns();
  EXPECT_EQ(server->peek("hanging"), "2");
}

TEST_F(LateWriteTest, GivesWayToWhatWasFoundThereMeanwhile) {
  giveUpAWrite();
  store->editLater("hanging", [](const auto&, const auto&) { return std::nullopt; });
  EXPECT_EQ(set("behind", "1"), StoreStatus::kOk);
  itReturns();
  EXPECT_EQ(server->peek("hanging"), std::nullopt);
}

TEST_F(LateWriteTest, StaysWhereNobodyHasTouchedItsKey) {
  giveUpAWrite();
  itReturns();
  EXPECT_EQ(server->peek("hanging"), "1");
  remove("hanging");
  EXPECT_EQ(server->peek("hanging"), std::nullopt);
}

TEST_F(LateWriteTest, DoesNotBeginOnceItIsGivenUp) {
  stuck_before = threadSnapshot().stuck;
  server->blockNext();  // the making of the client
  leaveAHangingCall(*store, *server);
  EXPECT_EQ(set("b", "1"), StoreStatus::kOk);
  itReturns();
  EXPECT_EQ(server->peek("hanging"), std::nullopt);
}

TEST_F(LateWriteTest, OfALentClientDoesNotUndoWhatItsSuccessorWrote) {
  const Lender lender(*server);
  StoreThread borrower("lent", server->factory("own"), lender.lends(milliseconds(50)));
  stuck_before = threadSnapshot().stuck;
  server->blockNextSet();
  EXPECT_EQ(borrower.set("a", "1", soon(), nullptr).status, StoreStatus::kOk);
  EXPECT_EQ(borrower.set("a", "2", soon(), nullptr).status, StoreStatus::kOk);
  itReturns();
  EXPECT_EQ(server->peek("a"), "2");
}

TEST_F(StoreThreadTest, ALentClientThatFailsGivesWayToItsOwn) {
  const Lender lender(*server);
  StoreThread borrower("lent", server->factory("own"), lender.lends());
  server->failNext(1);
  EXPECT_EQ(borrower.set("a", "1", soon(), nullptr).status, StoreStatus::kOk);
  EXPECT_EQ(server->use("own").clients, 1);
}

TEST_F(StoreThreadTest, ALenderThatGoesTakesItsClientAlongUnlessACallIsPosted) {
  std::optional<Lender> lender(*server);
  StoreThread borrower("lent", server->factory("own"), lender->lends());
  server->put("rubbish", "1");
  server->blockNext();
  leaveAHangingCall(borrower, *server);
  borrower.removeLater({"rubbish"});
  const std::weak_ptr<StoreClient> client = lender->client;
  lender.reset();
  EXPECT_FALSE(client.expired());
  server->release();
  EXPECT_TRUE(eventually([&] { return !server->peek("rubbish") && client.expired(); }));
  EXPECT_EQ(server->use("own").clients, 0);
  EXPECT_EQ(borrower.set("a", "1", soon(), nullptr).status, StoreStatus::kOk);
  EXPECT_EQ(server->use("own").clients, 1);
}

TEST_F(StoreThreadTest, WithoutAThreadCallsRunOnTheCallers) {
  const size_t threads = threadSnapshot().running.size();
  const auto calls = StoreThread::onCaller("caller", server->factory("own"));
  EXPECT_EQ(calls->set("a", "1", soon(), nullptr).status, StoreStatus::kOk);
  calls->editLater("a", [](const auto& found, const auto&) { return found + "2"; });
  EXPECT_EQ(server->peek("a"), "12");
  EXPECT_LE(threadSnapshot().running.size(), threads);  // an earlier test's may have ended
}

TEST_F(StoreThreadTest, AProcessThatCannotConnectForWantOfSomethingSaysSo) {
  StoreThread starved(
      "starved", []() -> std::unique_ptr<StoreClient> { throw StoreShortage("no descriptors"); });
  const auto reply = starved.set("a", "1", soon(), nullptr);
  EXPECT_EQ(reply.status, StoreStatus::kStarved);
  EXPECT_EQ(reply.error, "the store at starved: no descriptors");
}

}  // namespace
}  // namespace torchft_ext
