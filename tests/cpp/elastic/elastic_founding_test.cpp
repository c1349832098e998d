// How processes found a job in a store: who sits down, who founds, and what it costs the store.
#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <string>
#include <thread>

#include "cpp/membership/memory_store.h"
#include "elastic/job_founder.h"

namespace torchft_ext {
namespace {

constexpr std::chrono::seconds kLong{20};

Member memberOf(int i) {
  Member member;
  member.id.bytes[0] = static_cast<uint8_t>(i + 1);
  return member;
}

struct Process {
  Process(const std::shared_ptr<MemoryStore>& store, const std::string& name)
      : thread("test", store->comparing(name), "job/") {}

  Founding findPlace(int i, int size, Duration within = kLong) {
    const JobFounder founder(thread, "test", size, {});
    return founder.findPlace(memberOf(i), Deadline::after(within), {}).founding;
  }
  JobStoreThread thread;
};

struct JobInMemory {
  std::shared_ptr<MemoryStore> store = std::make_shared<MemoryStore>();
  void sitDown(int i) const { JobStore(store->comparing("other"), "job/").takeSeat(memberOf(i)); }
};

TEST(ElasticFounding, ALookOfWhoWaitsReadsThreeKeys) {
  const JobInMemory job;
  for (int i = 0; i < 40; ++i) job.sitDown(i);
  Process process(job.store, "me");
  EXPECT_THROW(process.findPlace(40, 64, milliseconds(200)), ElasticError);
  const int looks = 200 / 10 + 2;  // one each 10 ms at most, and one before, one after
  EXPECT_LE(job.store->use("me").calls(), 3 * looks + 2);
}

TEST(ElasticFounding, WhoDiedOnItsWayToASeatIsNoFounder) {
  const JobInMemory job;
  job.store->put("job/seats", "1");
  Process one(job.store, "one");
  Process two(job.store, "two");
  auto first = std::async(std::launch::async, [&] { return one.findPlace(1, 2); });
  const Founding founding = two.findPlace(2, 2);
  EXPECT_EQ(founding.view, first.get().view);
  EXPECT_TRUE(founding.view.has(memberOf(1).id));
  EXPECT_TRUE(founding.view.has(memberOf(2).id));
}

TEST(ElasticFounding, OthersFoundWhereTheLastToComeDies) {
  const JobInMemory job;
  Process process(job.store, "me");
  auto founding = std::async(std::launch::async, [&] { return process.findPlace(0, 2); });
  while (!job.store->peek("job/seat/0")) std::this_thread::yield();
  job.sitDown(1);
  EXPECT_EQ(founding.get().view.members.size(), 2U);
}

}  // namespace
}  // namespace torchft_ext
