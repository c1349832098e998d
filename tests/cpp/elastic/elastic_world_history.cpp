#include "cpp/elastic/elastic_world_history.h"

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "elastic/elastic_codec.h"

namespace torchft_ext {

static bool contains(const std::vector<MemberId>& ids, const MemberId& id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

void ElasticWorldHistory::adopt(View view) {
  view.secret = {};  // others than its members are not told
  has_news_ = true;
  const auto [known, fresh] = views_.try_emplace(keyOf(view), view);
  if (!fresh && known->second != view) {
    fail("two views have the number " + std::to_string(view.number));
  }
}

void ElasticWorldHistory::checkLeftOut(const View& view) {
  const auto before = views_.find({numberOf(view.lineage), view.number - 1});
  if (before == views_.end()) return;
  const View& base = before->second;
  const auto stays = [&](const MemberId& id) { return view.has(id); };
  const std::vector<MemberId> all = idsOf(base.members);
  if (std::all_of(all.begin(), all.end(), stays)) return;
  // Learners that an agreement may have promoted count with those that voted before.
  const bool promoted =
      std::any_of(view.voters.begin(), view.voters.end(),
                  [&](const MemberId& id) { return base.has(id) && !contains(base.voters, id); });
  const std::vector<MemberId>& voters = promoted ? all : base.voters;
  const auto kept = std::count_if(voters.begin(), voters.end(), stays);
  const auto of = static_cast<ptrdiff_t>(voters.size());
  if (2 * kept < of || (2 * kept == of && base.witness.isZero())) {
    fail("view " + std::to_string(view.number) + ": members are left out by fewer than half");
  }
}

void ElasticWorldHistory::sayNo(int member, const ViewKey& view, uint64_t index) {
  has_news_ = true;
  said_no_[{view, index}].insert(member);
}

void ElasticWorldHistory::sayDigest(int member, const ViewKey& view, uint64_t index,
                                    const VoteDigest& digest) {
  has_news_ = true;
  digests_[{view, index}][member] = digest;
}

void ElasticWorldHistory::returnFrom(int member, LineageNumber lineage, const Outcome& outcome) {
  const Key key{{lineage, outcome.view}, outcome.index};
  has_news_ = true;
  const auto [known, fresh] = returned_.try_emplace(key, outcome.answer);
  const bool same =
      known->second.ok == outcome.answer.ok && known->second.diverged == outcome.answer.diverged;
  if (!fresh && !same) {
    fail("two answers to agreement " + std::to_string(key.second) + " of view " +
         std::to_string(key.first.second));
  }
  if (outcome.answer.diverged && digests_.contains(key) && divergedIn(key, {}).first < 0) {
    fail("no digests differ where an answer says so");
  }
  returned_by_[key].insert(member);
}

const View& ElasticWorldHistory::newestOf(LineageNumber lineage) const {
  return std::prev(views_.upper_bound({lineage, UINT64_MAX}))->second;
}

void ElasticWorldHistory::check() {
  if (!has_news_) return;
  has_news_ = false;
  for (const auto& [key, answer] : returned_) {
    if (answer.ok && views_.contains(key.first)) checkOk(key);
  }
}

// It needs all who went on, and no later view may contradict it.
void ElasticWorldHistory::checkOk(const Key& key) {
  const View& before = views_.at(key.first);
  const auto next = views_.find({key.first.first, key.first.second + 1});
  const View& judged = next == views_.end() ? before : next->second;
  for (const int i : said_no_[key]) {
    if (judged.has(idOfMember(i)) && before.has(idOfMember(i))) {
      fail("ok although member " + std::to_string(i) + ", who goes on, said no");
    }
  }
  const auto [one, other] = divergedIn(key, {&before, &judged});
  if (one >= 0) {
    fail("ok although the digests of members " + std::to_string(one) + " and " +
         std::to_string(other) + ", who go on, differ");
  }
  if (next != views_.end()) checkNext(key, next->second);
}

std::pair<int, int> ElasticWorldHistory::divergedIn(const Key& key,
                                                    const std::vector<const View*>& views) const {
  const auto said = digests_.find(key);
  if (said == digests_.end()) return {-1, -1};
  const auto counts = [&](int member) {
    return std::all_of(views.begin(), views.end(),
                       [&](const View* view) { return view->has(idOfMember(member)); });
  };
  for (const auto& [one, first] : said->second) {
    for (const auto& [other, second] : said->second) {
      if (!counts(one) || !counts(other)) continue;
      const bool same_shard = first.shard == second.shard;
      if (first.common != second.common || (same_shard && first.of_shard != second.of_shard)) {
        return {one, other};
      }
    }
  }
  return {-1, -1};
}

void ElasticWorldHistory::checkNext(const Key& key, const View& next) {
  const Outcome* outcome = next.outcomeOf(key.second);
  const std::string name = "view " + std::to_string(next.number);
  if (outcome != nullptr && !outcome->answer.ok) {
    fail(name + " takes back an ok of the one before");
  }
  for (const Member& member : next.members) {
    const bool was_there = views_.at(key.first).has(member.id);
    if (outcome == nullptr && was_there && !returned_by_[key].contains(indexOfMember(member.id))) {
      fail(name + " does not know an ok of the one before");
    }
  }
}

void ElasticWorldHistory::fail(const std::string& what) {
  if (wrong_.empty()) wrong_ = what;
}

void ElasticWorldHistory::write(ByteWriter& writer) const {
  for (const auto& [key, view] : views_) writer.text(encodeView(view));
  for (const auto& [key, answer] : returned_) {
    writer.u64(key.first.second);
    writer.u64(key.second);
    writer.u8(answer.ok ? 1 : 0);
    for (const int i : returned_by_.at(key)) writer.u8(static_cast<uint8_t>(i));
  }
  for (const auto& [key, members] : said_no_) {
    writer.u64(key.first.second);
    writer.u64(key.second);
    for (const int i : members) writer.u8(static_cast<uint8_t>(i));
  }
  for (const auto& [key, digests] : digests_) {
    writer.u64(key.first.second);
    writer.u64(key.second);
    for (const auto& [i, digest] : digests) {
      writer.u8(static_cast<uint8_t>(i));
      writer.text(digest.common);
      writer.text(digest.of_shard);
    }
  }
}

}  // namespace torchft_ext
