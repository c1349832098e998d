// Members that work, die without a word, leave and join, for a while: nobody hangs, and all that
// return from an agreement return the same.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "elastic/elastic_member.h"
#include "memory_store.h"

namespace torchft_ext {
namespace {

constexpr std::chrono::seconds kLong{20};

class Soak {
 public:
  Soak(int workers, Duration how_long) : until_(Clock::now() + how_long) {
    std::vector<std::thread> threads;
    for (int i = 0; i < workers; ++i) {
      threads.emplace_back([this, i, workers] { work(i, workers); });
    }
    for (std::thread& thread : threads) thread.join();
  }

  int deaths = 0;
  uint64_t agreed = 0;
  uint64_t last_view = 0;
  std::string wrong;

 private:
  void work(int number, int size) {
    std::mt19937_64 random(static_cast<uint64_t>(number));
    while (!over()) {
      try {
        live(random, size);
      } catch (const ElasticError& error) {
        if (over()) return;  // the others have ended before this one had come
        fail("worker " + std::to_string(number) + ": " + error.what());
        return;
      }
    }
  }

  void live(std::mt19937_64& random, int size) {
    ElasticOptions options;
    options.job = "soak";
    options.size = size;
    options.bind_address = *SocketAddress::fromNumeric("127.0.0.1", 0);
    options.limit = std::chrono::seconds(2);
    options.store = store_->comparing("member");
    options.prefix = "job/";
    const auto member = ElasticMember::join(options, Deadline::after(kLong));
    View view = member->awaitView(0, Deadline::after(kLong));
    uint64_t index = 0;
    for (;;) {
      const bool last = over();
      Vote vote;
      vote.ok = random() % 5 != 0;
      vote.leaving = last;
      if (view.members.size() >= 3 && random() % 50 == 0 && mayDie())
        return die(*member, view, vote);
      const Answer answer = member->agree(view.number, vote, Deadline::after(kLong));
      note(view.number, ++index, answer);
      if (!answer.leaving.empty()) {  // all end here
        member->leave(Deadline::after(std::chrono::seconds(5)));
        return;
      }
      if (member->isOver(view.number) || !answer.waiting.empty()) {
        view = member->awaitView(view.number, Deadline::after(kLong));
        index = 0;
      }
    }
  }

  // In the middle of an agreement, or before it.
  static void die(ElasticMember& member, const View& view, const Vote& vote) {
    try {
      member.agree(view.number, vote, Deadline::after(std::chrono::microseconds(300)));
    } catch (const ElasticError&) {
      return;
    }
  }

  bool mayDie() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (Clock::now() < next_death_ || over()) return false;
    next_death_ = Clock::now() + milliseconds(60);
    ++deaths;
    return true;
  }

  void note(uint64_t view, uint64_t index, const Answer& answer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto [known, fresh] = answers_.try_emplace({view, index}, answer);
    if (!fresh && !(known->second == answer)) {
      wrong += "two answers to agreement " + std::to_string(index) + " of view " +
               std::to_string(view) + "; ";
    }
    ++agreed;
    last_view = std::max(last_view, view);
  }

  void fail(const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex_);
    wrong += what + "; ";
    until_ = Clock::now();
  }
  bool over() const { return Clock::now() >= until_.load(); }

  const std::shared_ptr<MemoryStore> store_ = std::make_shared<MemoryStore>();
  std::atomic<Clock::time_point> until_;
  std::mutex mutex_;
  Clock::time_point next_death_ = Clock::now() + milliseconds(100);
  std::map<std::pair<uint64_t, uint64_t>, Answer> answers_;
};

TEST(ElasticSoak, MembersComeAndGo) {
  const Soak soak(4, std::chrono::seconds(3));
  EXPECT_EQ(soak.wrong, "");
  EXPECT_GT(soak.deaths, 3);
  EXPECT_GT(soak.last_view, 5U);
  std::printf("%d deaths, %llu answers, view %llu\n", soak.deaths,
              static_cast<unsigned long long>(soak.agreed),
              static_cast<unsigned long long>(soak.last_view));
}

}  // namespace
}  // namespace torchft_ext
