// Members that work, die without a word, leave and join, for a while: nobody hangs, and all that
// return from an agreement return the same. Nothing in it is bound to a time that threads without a
// core cannot keep: it goes on until enough has happened.
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

#include "cpp/membership/memory_store.h"
#include "elastic/elastic_member.h"

namespace torchft_ext {
namespace {

constexpr std::chrono::seconds kLong{60};
constexpr int kDeaths = 4;      // at least
constexpr uint64_t kViews = 6;  // likewise

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
    options.limit = kLong;  // a member without a core is not frozen; the dead are found at once
    options.store = store_->comparing("member");
    options.prefix = "job/";
    const auto member = ElasticMember::join(options, Deadline::after(kLong));
    View view = member->awaitView(0, Deadline::after(kLong));
    uint64_t index = 0;
    uint64_t first_ok = 0;  // in this view
    for (;;) {
      const bool last = over();
      Vote vote;
      vote.ok = random() % 5 != 0;
      vote.leaving = last;
      // Once all others have returned from an ok: else this may be the only voter.
      const bool all_vote = first_ok > 0 && index > first_ok;
      if (view.members.size() >= 3 && all_vote && random() % 50 == 0 && mayDie(view.number))
        return die(*member, view, vote);
      const Answer answer = member->agree(view.number, vote, Deadline::after(kLong));
      note(view.number, ++index, answer);
      if (answer.ok && first_ok == 0) first_ok = index;
      if (!answer.leaving.empty()) {  // all end here
        member->leave(Deadline::after(std::chrono::seconds(5)));
        return;
      }
      if (member->isOver(view.number) || !answer.waiting.empty()) {
        view = member->awaitView(view.number, Deadline::after(kLong));
        index = first_ok = 0;
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

  // One of each view: of three, two could decide nothing else, however long the next view takes.
  bool mayDie(uint64_t view) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (Clock::now() < next_death_ || view <= last_death_ || over()) return false;
    next_death_ = Clock::now() + milliseconds(60);
    last_death_ = view;
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
    enough_ = enough_ || (deaths >= kDeaths && last_view >= kViews);
  }

  void fail(const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex_);
    wrong += what + "; ";
    enough_ = true;
    until_ = Clock::now();
  }
  bool over() const {
    const auto now = Clock::now();
    return now >= until_.load() && (enough_ || now >= until_.load() + kLong);
  }

  const std::shared_ptr<MemoryStore> store_ = std::make_shared<MemoryStore>();
  std::atomic<Clock::time_point> until_;
  std::atomic<bool> enough_{false};
  std::mutex mutex_;
  Clock::time_point next_death_ = Clock::now() + milliseconds(100);
  uint64_t last_death_ = 0;  // in which view
  std::map<std::pair<uint64_t, uint64_t>, Answer> answers_;
};

TEST(ElasticSoak, MembersComeAndGo) {
  const Soak soak(4, std::chrono::seconds(3));
  EXPECT_EQ(soak.wrong, "");
  EXPECT_GE(soak.deaths, kDeaths);
  EXPECT_GE(soak.last_view, kViews);
  std::printf("%d deaths, %llu answers, view %llu\n", soak.deaths,
              static_cast<unsigned long long>(soak.agreed),
              static_cast<unsigned long long>(soak.last_view));
}

}  // namespace
}  // namespace torchft_ext
