#include "cpp/elastic/elastic_world_rest.h"

#include <algorithm>

#include "cpp/elastic/elastic_world.h"

namespace torchft_ext {

std::set<int> ElasticWorldRest::lineages() const {
  std::set<LineageNumber> all{1};
  for (int i = 0; i < world_.size(); ++i) {
    if (world_.lineageOf(i) != 0) all.insert(world_.lineageOf(i));
  }
  return all;
}

bool ElasticWorldRest::isGoneFrom(LineageNumber lineage, int i) const {
  return world_.dead(i) || (world_.core(i).view().number > 0 && world_.lineageOf(i) != lineage);
}

bool ElasticWorldRest::isDue() const {
  const std::set<LineageNumber> all = lineages();
  return std::any_of(all.begin(), all.end(), [&](LineageNumber one) { return isDueIn(one); });
}

bool ElasticWorldRest::isDueIn(LineageNumber lineage) const {
  if (!world_.options().cut.empty()) return false;
  const std::vector<View> binding = bindingViews(lineage);
  return std::all_of(binding.begin(), binding.end(),
                     [&](const View& view) { return mayBeDecidedAfter(view); });
}

// Every view that was decided, or that somebody has accepted for the next one: it may have to be
// taken up. And those whose learners may have been promoted, by what the living know.
std::vector<View> ElasticWorldRest::bindingViews(LineageNumber lineage) const {
  std::vector<View> all;
  const auto add = [&, from = firstThatBinds(lineage)](const View& view) {
    if (numberOf(view.lineage) == lineage && view.number >= from) all.push_back(view);
  };
  for (const auto& [key, view] : world_.history().views()) add(view);
  for (const auto& [number, held] : world_.store().held()) add(held.view);
  for (const View& view : world_.acceptedByParted()) add(view);
  for (int i = 0; i < world_.size(); ++i) {
    if (world_.core(i).accepted()) add(world_.core(i).accepted()->view);
    if (isGoneFrom(lineage, i) || world_.core(i).promotion() == Promotion::kNo) continue;
    View promoted = world_.core(i).view();
    promoted.voters = idsOf(promoted.members);
    add(promoted);
  }
  return all;
}

// What the store has decided can be read there by who knows the view before it: that one needs
// nobody any more.
uint64_t ElasticWorldRest::firstThatBinds(LineageNumber lineage) const {
  const auto held = world_.store().held().find(lineage);
  if (!world_.options().store_rule || held == world_.store().held().end()) return 0;
  const uint64_t number = held->second.view.number;
  for (int i = 0; i < world_.size(); ++i) {
    if (isGoneFrom(lineage, i) || world_.core(i).state() == ElasticCore::State::kLeftOut) continue;
    const View& view = world_.core(i).view();
    const bool reads_it =
        view.number + 1 == number && view.witness == world_.store().identityTo(lineage);
    if (reads_it || view.number >= number) return number;
  }
  return 0;
}

// Where half of the voters live and the witness does, only safety is checked.
bool ElasticWorldRest::mayBeDecidedAfter(const View& view) const {
  const LineageNumber lineage = numberOf(view.lineage);
  const auto alive = static_cast<size_t>(
      std::count_if(view.voters.begin(), view.voters.end(),
                    [&](const MemberId& id) { return !isGoneFrom(lineage, indexOfMember(id)); }));
  if (!world_.options().store_rule || view.witness.isZero()) return 2 * alive > view.voters.size();
  return !world_.store().isLost() && view.witness == world_.store().identityTo(lineage) &&
         alive >= std::min(view.voters.size(), static_cast<size_t>(world_.options().min_size));
}

bool ElasticWorldRest::isThereIn(LineageNumber lineage) const {
  const View& last = world_.history().newestOf(lineage);
  for (const Member& member : last.members) {
    const int i = indexOfMember(member.id);
    if (!isGoneFrom(lineage, i) && world_.core(i).state() == ElasticCore::State::kJoining) {
      return false;  // untold
    }
  }
  uint64_t newest = 0;
  for (int i = 0; i < world_.size(); ++i) {
    if (!isGoneFrom(lineage, i)) newest = std::max(newest, world_.core(i).view().number);
  }
  for (int i = 0; i < world_.size(); ++i) {
    if (isGoneFrom(lineage, i) || world_.core(i).state() == ElasticCore::State::kLeftOut) continue;
    if (world_.core(i).state() == ElasticCore::State::kJoining) continue;
    if (world_.core(i).state() != ElasticCore::State::kActive ||
        world_.core(i).view().number != newest || world_.isPending(i)) {
      return false;
    }
    for (const Member& member : world_.core(i).view().members) {
      if (isGoneFrom(lineage, indexOfMember(member.id))) return false;
    }
  }
  return true;
}

bool ElasticWorldRest::isThere() const {
  const std::set<LineageNumber> all = lineages();
  return std::all_of(all.begin(), all.end(),
                     [&](LineageNumber one) { return isThereIn(one) || !isDueIn(one); });
}

}  // namespace torchft_ext
