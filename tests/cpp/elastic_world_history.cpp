#include "elastic_world_history.h"

#include "elastic_world_members.h"

namespace torchft_ext {

void ElasticWorldHistory::adopt(View view) {
  view.secret = {};  // others than its members are not told
  has_news_ = true;
  const auto [known, fresh] = views_.try_emplace(view.number, view);
  if (!fresh && known->second != view) {
    fail("two views have the number " + std::to_string(view.number));
  }
}

void ElasticWorldHistory::sayNo(int member, uint64_t view, uint64_t index) {
  has_news_ = true;
  said_no_[{view, index}].insert(member);
}

void ElasticWorldHistory::returnFrom(int member, const Outcome& outcome) {
  const Key key{outcome.view, outcome.index};
  has_news_ = true;
  const auto [known, fresh] = returned_.try_emplace(key, outcome.answer);
  if (!fresh && known->second.ok != outcome.answer.ok) {
    fail("two answers to agreement " + std::to_string(key.second) + " of view " +
         std::to_string(key.first));
  }
  returned_by_[key].insert(member);
}

void ElasticWorldHistory::check() {
  if (!has_news_) return;
  has_news_ = false;
  for (const auto& [key, answer] : returned_) {
    if (answer.ok) checkOk(key);
  }
}

// It needs all who went on, and no later view may contradict it.
void ElasticWorldHistory::checkOk(const Key& key) {
  const auto next = views_.find(key.first + 1);
  const View& before = views_.at(key.first);
  const View& judged = next == views_.end() ? before : next->second;
  for (const int i : said_no_[key]) {
    if (judged.has(idOfMember(i)) && before.has(idOfMember(i))) {
      fail("ok although member " + std::to_string(i) + ", who goes on, said no");
    }
  }
  if (next == views_.end()) return;
  const Outcome* outcome = judged.outcomeOf(key.second);
  if (outcome != nullptr && !outcome->answer.ok) {
    fail("view " + std::to_string(next->first) + " takes back an ok of the one before");
  }
  for (const Member& member : judged.members) {
    const bool was_there = before.has(member.id);
    if (outcome == nullptr && was_there && !returned_by_[key].contains(indexOfMember(member.id))) {
      fail("view " + std::to_string(next->first) + " does not know an ok of the one before");
    }
  }
}

void ElasticWorldHistory::fail(const std::string& what) {
  if (wrong_.empty()) wrong_ = what;
}

void ElasticWorldHistory::write(ByteWriter& writer) const {
  for (const auto& [number, view] : views_) writer.text(encodeView(view));
  for (const auto& [key, answer] : returned_) {
    writer.u64(key.first);
    writer.u64(key.second);
    writer.u8(answer.ok ? 1 : 0);
    for (const int i : returned_by_.at(key)) writer.u8(static_cast<uint8_t>(i));
  }
  for (const auto& [key, members] : said_no_) {
    writer.u64(key.first);
    for (const int i : members) writer.u8(static_cast<uint8_t>(i));
  }
}

}  // namespace torchft_ext
