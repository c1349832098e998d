// The protocol's cores of several members, without sockets: what they say to each other arrives
// when a test says so.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "elastic/elastic_core.h"
#include "elastic/view_check.h"

namespace torchft_ext::elastic_test {

// Of the member with that place among the cores.
inline MemberId idOf(size_t i) {
  MemberId id;
  id.bytes[0] = static_cast<uint8_t>(i + 1);
  return id;
}

inline size_t indexOf(const MemberId& id) {
  return static_cast<size_t>(id.bytes[0] - 1);
}

// The first so many are its founders.
inline View firstView(size_t members) {
  View view;
  view.lineage.bytes[0] = 1;
  view.number = 1;
  setSecret(view, ViewSecret::random());
  for (size_t i = 0; i < members; ++i) view.members.push_back({idOf(i), 1, {}});
  view.voters = idsOf(view.members);
  return view;
}

class ElasticCores : public testing::Test {
 protected:
  struct Message {
    size_t from;
    size_t to;
    std::shared_ptr<const ElasticMessage> words;
  };

  // All members of that view, and newcomers that ask them; ready, each with a seed of its own.
  void make(const View& view, const ElasticRules& rules, size_t newcomers) {
    for (const Member& member : view.members) cores_.emplace_back(member, rules, view);
    for (size_t i = 0; i < newcomers; ++i) {
      cores_.emplace_back(Member{idOf(cores_.size()), 0, {}}, rules, view.voters);
    }
    for (ElasticCore& core : cores_) {
      core.setSeed(ViewSecret::random());
      core.setReady(true);
    }
  }

  virtual void carryOut(size_t from, const ElasticEffects& effects) {
    for (const auto& [to, words] : effects.sends) under_way_.push_back({from, indexOf(to), words});
    if (effects.no_quorum.empty()) return;
    ++no_quorum_;
    hopeless_ = effects.hopeless;
  }
  // What may arrive does, and what is said to that; the rest waits.
  void deliver(const std::function<bool(const Message&)>& mayArrive) {
    std::deque<Message> kept;
    while (!under_way_.empty()) {
      const Message one = under_way_.front();
      under_way_.pop_front();
      if (mayArrive(one)) {
        carryOut(one.to, cores_[one.to].receive(idOf(one.from), *one.words));
      } else {
        kept.push_back(one);
      }
    }
    under_way_ = kept;
  }
  void deliver() {
    deliver([](const Message&) { return true; });
  }

  std::vector<ElasticCore> cores_;
  std::deque<Message> under_way_;
  int no_quorum_ = 0;      // how often one has said that there is none
  bool hopeless_ = false;  // and that there will be none: the last time
};

}  // namespace torchft_ext::elastic_test
