// Whole members of an elastic job, several in this process, over real connections and a store in
// memory: for tests of what they do together.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cpp/membership/memory_store.h"
#include "elastic/elastic_member.h"

namespace torchft_ext::elastic_test {

using MemberPtr = std::shared_ptr<ElasticMember>;
inline constexpr std::chrono::seconds kLong{20};

inline std::future<View> awaitView(const MemberPtr& member, uint64_t newer_than,
                                   const std::set<MemberId>& leave_out = {}) {
  return std::async(std::launch::async, [member, newer_than, leave_out] {
    return member->awaitView(newer_than, Deadline::after(kLong), {}, {}, leave_out);
  });
}

// Of a member that gets no view.
inline ElasticError whyNoView(const MemberPtr& member, uint64_t newer_than,
                              Duration limit = kLong) {
  try {
    member->awaitView(newer_than, Deadline::after(limit));
  } catch (const ElasticError& error) {
    return error;
  }
  ADD_FAILURE() << "expected no view";
  return {ElasticErrorKind::kState, "it got a view"};
}

inline size_t countOf(const std::string& words, const ElasticError& error) {
  const std::string text = error.what();
  size_t count = 0;
  for (size_t at = 0; (at = text.find(words, at)) != std::string::npos; ++at) ++count;
  return count;
}

// Returns once its thread has come to what it was told before.
inline void awaitThreadOf(const MemberPtr& member, uint64_t view) {
  StoreCall count;
  count.what = StoreCall::What::kCount;
  count.view = view;
  member->callStore(count, Deadline::after(kLong));
}

// Its user is busy elsewhere, so others may leave it out. Returns once they can.
inline void beAbsent(const MemberPtr& member, uint64_t view) {
  member->setReady(false);
  awaitThreadOf(member, view);
}

struct JobOfMembers {
  std::shared_ptr<MemoryStore> store = std::make_shared<MemoryStore>();
  std::vector<MemberPtr> members;
  int max_size = 100;
  bool store_rule = false;
  int min_size = 1;

  ElasticOptions options(int size) const {
    ElasticOptions options;
    options.rules.max_size = max_size;
    options.rules.store_rule = store_rule;
    options.rules.min_size = min_size;
    options.job = "test";
    options.size = size;
    options.bind_address = *SocketAddress::fromNumeric("127.0.0.1", 0);
    options.limit = std::chrono::seconds(2);
    options.store = store->comparing("member");
    options.prefix = "job/";
    return options;
  }

  MemberPtr join(int size) const {
    return ElasticMember::join(options(size), Deadline::after(kLong));
  }

  void found(int size, int at_most = 100) {
    max_size = at_most;
    std::vector<std::future<MemberPtr>> joining;
    joining.reserve(static_cast<size_t>(size));
    for (int i = 0; i < size; ++i) {
      joining.push_back(std::async(std::launch::async, [this, size] { return join(size); }));
    }
    for (auto& one : joining) members.push_back(one.get());
  }

  // Of every member that is there.
  std::vector<View> awaitViews(uint64_t newer_than, const std::set<MemberId>& leave_out = {}) {
    std::vector<std::future<View>> waiting;
    waiting.reserve(members.size());
    for (const MemberPtr& member : members) {
      waiting.push_back(awaitView(member, newer_than, leave_out));
    }
    std::vector<View> views;
    views.reserve(waiting.size());
    for (auto& one : waiting) views.push_back(one.get());
    return views;
  }

  // digests: none, or one of each.
  std::vector<Answer> agree(uint64_t view, const std::vector<bool>& oks,
                            const std::vector<VoteDigest>& digests = {}) {
    std::vector<std::future<Answer>> voting;
    for (size_t i = 0; i < members.size(); ++i) {
      voting.push_back(std::async(std::launch::async, [this, i, view, &oks, &digests] {
        Vote vote;
        vote.ok = oks[i];
        vote.note = "note " + std::to_string(i);
        if (!digests.empty()) vote.digest = digests[i];
        return members[i]->agree(view, vote, Deadline::after(kLong));
      }));
    }
    std::vector<Answer> answers;
    answers.reserve(voting.size());
    for (auto& one : voting) answers.push_back(one.get());
    return answers;
  }

  // All agree until an answer is so, which is the same for all. False: none was.
  bool agreeUntil(uint64_t view, const std::function<bool(const Answer&)>& isSo) {
    const Deadline deadline = Deadline::after(kLong);
    while (!deadline.expired()) {
      const std::vector<Answer> answers = agree(view, std::vector<bool>(members.size(), true));
      for (const Answer& answer : answers) {
        EXPECT_EQ(answer.waiting, answers[0].waiting);
        EXPECT_EQ(answer.new_witness, answers[0].new_witness);
      }
      if (isSo(answers[0])) return true;
      std::this_thread::sleep_for(milliseconds(1));
    }
    return false;
  }
};

inline void expectOneView(const std::vector<View>& views, uint64_t number, size_t size) {
  for (const View& view : views) {
    EXPECT_EQ(view, views.front());
    EXPECT_EQ(view.number, number);
    EXPECT_EQ(view.members.size(), size);
  }
}

}  // namespace torchft_ext::elastic_test
