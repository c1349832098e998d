// The table of plans: what is refused, what serves what, and members with different ones.
#include "host/shared_plans.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "cpp/comm/cluster.h"

namespace torchft_ext {
namespace {

SharedPlanTable tableOf(const std::string& text) {
  auto table = SharedPlanTable::parse(text);
  EXPECT_TRUE(std::holds_alternative<SharedPlanTable>(table)) << std::get<std::string>(table);
  return std::get<SharedPlanTable>(std::move(table));
}

std::string problemOf(const std::string& text) {
  const auto table = SharedPlanTable::parse(text);
  const auto* problem = std::get_if<std::string>(&table);
  return problem == nullptr ? "" : *problem;
}

const std::string kEnd = "\nallreduce any any any slices\n";

TEST(SharedPlans, TheTextOfATableIsTheSameTable) {
  const std::string own = "allreduce 2-4 few 64K once\nallreduce 3 enough 1000 once # so\n" + kEnd +
                          "\nbroadcast any any any chunks 16K\nalltoall any any any chunks slot\n";
  for (const SharedPlanTable& table : {SharedPlanTable(), tableOf(own)}) {
    const SharedPlanTable again = tableOf(table.text());
    EXPECT_EQ(again.text(), table.text());
    EXPECT_EQ(again.digests(), table.digests());
    EXPECT_EQ(again.digest(), table.digest());
  }
}

TEST(SharedPlans, EachSizeHasAPlanInEachWorld) {
  const SharedPlanTable table;
  for (int size = 2; size <= kMostSharing; ++size) {
    for (const bool few : {false, true}) {
      const SharedPlans plans = table.plansFor(size, few);
      for (const OpKind kind : SharedPlanTable::kPlannedKinds) {
        const size_t slot = sharedSlotBytes(size);
        for (const size_t bytes : {size_t{0}, size_t{81}, slot, slot + 1, kAnySize}) {
          const SharedPlanRow& row = plans.of(kind, bytes);
          EXPECT_LE(bytes, row.up_to);
          EXPECT_TRUE(row.plan != SharedPlan::kOnce || row.up_to <= slot);
        }
      }
    }
  }
}

TEST(SharedPlans, TheFirstRowThatFitsCounts) {
  const SharedPlanTable table = tableOf(
      "allreduce 4-8 few    64K once\n"
      "allreduce 4   enough 16K once\n" +
      kEnd);
  const auto plan = [&](int size, bool few, size_t bytes) {
    return table.plansFor(size, few).of(OpKind::kAllreduce, bytes).plan;
  };
  EXPECT_EQ(plan(4, true, 65536), SharedPlan::kOnce);
  EXPECT_EQ(plan(4, true, 65537), SharedPlan::kSlices);
  EXPECT_EQ(plan(4, false, 16384), SharedPlan::kOnce);
  EXPECT_EQ(plan(4, false, 65536), SharedPlan::kSlices);
  EXPECT_EQ(plan(5, false, 4), SharedPlan::kSlices);
  EXPECT_EQ(plan(9, true, 4), SharedPlan::kSlices);
  // What is not named stays.
  EXPECT_EQ(table.plansFor(4, true).of(OpKind::kBroadcast, 4).plan, SharedPlan::kLine);
  EXPECT_EQ(nameDifferences(table.digests(), SharedPlanTable().digests()), "allreduce");
}

TEST(SharedPlans, ABadTableIsRefusedWithItsLineAndTheReason) {
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"# plans\n\nallreduce any any once", "line 3: expected operation, ranks, cores, size, plan"},
      {"allreduce any any 1K once slot slot", "line 1: expected operation"},
      {"send any any any chunks", "a collective with plans, such as 'allreduce', found 'send'"},
      {"barrier any any any line", "found 'barrier'"},
      {"allreduce 1-4 any any slices", "line 1: expected ranks"},
      {"allreduce 4-3 any any slices", "found '4-3'"},
      {"allreduce 2-65 any any slices", "found '2-65'"},
      {"allreduce 2- any any slices", "found '2-'"},
      {"allreduce any 8 any slices", "line 1: expected cores"},
      {"allreduce any any 1G slices", "line 1: expected a size"},
      {"allreduce any any -1 slices", "line 1: expected a size"},
      {"allreduce any any 99999999999999999999 slices", "line 1: expected a size"},
      {"allreduce any any any ring", "line 1: expected a plan"},
      {"broadcast any any 4K once", "the plan once cannot run broadcast"},
      {"allreduce any any any chunks", "the plan chunks cannot run allreduce"},
      {"alltoall any any 80 line", "the plan line cannot run alltoall"},
      {"alltoall any any 1K chunks", "alltoall: expected 'any' size"},
      {"broadcast any any 81 line", "expected at most 80 bytes, found '81'"},
      {"allreduce 2-8 any 256K once", "at most a slot of 8 ranks, 128K, found '256K'"},
      {"allreduce any any 1K once 8K", "the plan once has no chunks"},
      {"gather 2-8 any any chunks 256K", "the chunk: expected 8K to a slot of 8 ranks, 128K"},
      {"gather any any any chunks 4K", "found '4K'"},
      {"gather any any any chunks 8200", "in whole cache lines of 64 bytes, found '8200'"},
      {"gather any any any chunks none", "line 1: expected a chunk"},
      {"allreduce any any 32K once", "allreduce: expected a row of 'any' size for 2 ranks"},
      {"allreduce any few any slices", "for 2 ranks with enough cores, found none"},
      {"allreduce 2-8 any any slices", "for 9 ranks with few cores, found none"},
  };
  for (const auto& [text, problem] : bad)
    EXPECT_NE(problemOf(text).find(problem), std::string::npos) << text << ": " << problemOf(text);
}

// ---------------------------------------------------------------- members

class SharedPlansOfMembers : public testing::Test {
 protected:
  void add(const std::string& plans) {
    HostEngineOptions options = loopbackOptions();
    options.plans = tableOf(plans);
    members_.push_back(
        std::make_unique<ClusterMember>(std::to_string(members_.size()), data_, options));
  }
  std::vector<FailurePtr> form(const std::string& prefix) {
    std::vector<FailurePtr> failures(members_.size());
    onAll([&](int rank) {
      failures[static_cast<size_t>(rank)] =
          member(rank).configure(prefix, rank, static_cast<int>(members_.size()));
    });
    return failures;
  }
  void onAll(const std::function<void(int)>& body) {
    std::vector<int> all;
    for (size_t i = 0; i < members_.size(); ++i) all.push_back(static_cast<int>(i));
    Cluster::on(all, body);
  }
  ClusterMember& member(int rank) { return *members_[static_cast<size_t>(rank)]; }
  int64_t counted(int rank, const std::string& name) {
    for (const auto& [each, count] : member(rank).engine->counters()) {
      if (each == name) return count;
    }
    ADD_FAILURE() << "no counter " << name;
    return -1;
  }

  std::shared_ptr<MemoryStore> data_ = std::make_shared<MemoryStore>();
  std::vector<std::unique_ptr<ClusterMember>> members_;
};

TEST_F(SharedPlansOfMembers, DecideHowASumIsMade) {
  for (int rank = 0; rank < 3; ++rank) add("allreduce any any 100 once\n" + kEnd);
  for (const FailurePtr& failure : form("way")) ASSERT_EQ(failure, nullptr) << failure->describe();
  onAll([&](int rank) {
    for (const size_t items : {size_t{1}, size_t{25}, size_t{26}, size_t{200000}}) {
      std::vector<float> values(items, static_cast<float>(rank + 1));
      EXPECT_EQ(finish(member(rank).group->issue(allreduceOf(values))), nullptr);
      EXPECT_EQ(values, std::vector<float>(items, 6));
    }
  });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(counted(rank, "shared_generations"), 1);
    EXPECT_EQ(counted(rank, "shared_line"), 0);
    EXPECT_EQ(counted(rank, "shared_once"), 2);
    EXPECT_EQ(counted(rank, "shared_slices"), 2);
    EXPECT_EQ(counted(rank, "shared_plans"), counted(0, "shared_plans"));
  }
}

// Floats whose sum depends on the order of the ranks.
std::vector<float> unevenOf(int rank, size_t items) {
  std::vector<float> values(items);
  for (size_t i = 0; i < items; ++i) {
    const auto place = static_cast<float>((i * 7919 + static_cast<size_t>(rank) * 104729) % 1000);
    values[i] = (place + 0.1F) * (rank % 2 == 0 ? 1e6F : 1e-3F);
  }
  return values;
}

// By size: 4 bytes go through the line, and the last one through several chunks.
TEST_F(SharedPlansOfMembers, AddFloatsInTheOrderOfRanksWhateverThePlan) {
  constexpr int kSize = 4;
  for (const std::string& plans :
       {"allreduce any any 32K once" + kEnd, "allreduce any any any slices 8K\n" + kEnd}) {
    members_.clear();
    for (int rank = 0; rank < kSize; ++rank) add(plans);
    for (const FailurePtr& failure : form(plans)) ASSERT_EQ(failure, nullptr);
    for (const size_t items : {size_t{1}, size_t{999}, size_t{8192}, size_t{100001}}) {
      std::vector<float> wanted = unevenOf(0, items);
      for (int rank = 1; rank < kSize; ++rank) {
        const std::vector<float> part = unevenOf(rank, items);
        for (size_t i = 0; i < items; ++i) wanted[i] += part[i];
      }
      onAll([&](int rank) {
        std::vector<float> values = unevenOf(rank, items);
        EXPECT_EQ(finish(member(rank).group->issue(allreduceOf(values))), nullptr);
        EXPECT_EQ(values, wanted) << items << " items on rank " << rank << " with " << plans;
      });
    }
  }
}

TEST_F(SharedPlansOfMembers, ThatDifferAreAMismatchWhichNamesTheRanksAndTheOperations) {
  add("");
  add("allreduce any any 100 once\n" + kEnd + "gather any any any chunks 8K\n");
  add("");
  const std::string built_in = std::to_string(counted(0, "shared_plans"));
  const std::string own = std::to_string(counted(1, "shared_plans"));
  ASSERT_NE(built_in, own);
  for (const FailurePtr& failure : form("apart")) {
    ASSERT_NE(failure, nullptr);
    EXPECT_EQ(failure->kind, FailureKind::kMismatch) << failure->describe();
    EXPECT_EQ(failure->cause.rank, 1);
    const std::string text = failure->describe();
    EXPECT_NE(text.find("differ for allreduce, gather;"), std::string::npos) << text;
    EXPECT_NE(text.find("digest " + built_in + " on ranks 0, 2"), std::string::npos) << text;
    EXPECT_NE(text.find("digest " + own + " on ranks 1"), std::string::npos) << text;
    EXPECT_NE(text.find("TORCHFT_EXT_SHARED_MEMORY_PLANS"), std::string::npos) << text;
    EXPECT_NE(text.find("; correct this, then"), std::string::npos) << text;
  }
}

TEST_F(SharedPlansOfMembers, MayDifferWhereMemoryIsNotShared) {
  HostEngineOptions options = loopbackOptions();
  for (const char* plans : {"", "gather any any any chunks 8K\n"}) {
    options.plans = tableOf(plans);
    options.shared_memory = false;
    members_.push_back(
        std::make_unique<ClusterMember>(std::to_string(members_.size()), data_, options));
  }
  for (const FailurePtr& failure : form("sockets"))
    EXPECT_EQ(failure, nullptr) << failure->describe();
  EXPECT_EQ(counted(0, "shared_generations"), 0);
}

}  // namespace
}  // namespace torchft_ext
