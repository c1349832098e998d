#include "elastic/listed_store.h"

#include <atomic>
#include <utility>

#include "base/mutex.h"

namespace torchft_ext {
namespace {

constexpr milliseconds kBetweenLooks{200};  // for an earlier place
constexpr milliseconds kOthersWithin{300};  // once one has answered
constexpr std::chrono::seconds kMeetWithin{3};
constexpr std::chrono::seconds kAnswerWithin{10};

uint64_t nextLink() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

}  // namespace

// A connection, or a try at one: written on the loop, awaited on the store's thread.
struct ListedStore::Place {
  const uint64_t link = nextLink();
  SocketAddress address;
  Mutex mutex;
  CondVar changed;
  bool met GUARDED_BY(mutex) = false;
  Standing standing GUARDED_BY(mutex);
  std::optional<std::string> ended GUARDED_BY(mutex);  // why
  uint64_t last_call GUARDED_BY(mutex) = 0;
  std::optional<StoreAnswer> answer GUARDED_BY(mutex);  // to the last call

  explicit Place(SocketAddress where) : address(where) {}

  void awaitMeeting(Deadline deadline) {
    const MutexLock lock(mutex);
    while (!met && !ended && !deadline.expired()) changed.waitUntil(mutex, deadline);
  }
  bool hasMet() {
    const MutexLock lock(mutex);
    return met && !ended;
  }
  Standing standingNow() {
    const MutexLock lock(mutex);
    return met && !ended ? standing : Standing{};
  }
  std::string whyNot() {
    const MutexLock lock(mutex);
    return address.toString() + ": " + ended.value_or("no answer");
  }
};

ListedStore::ListedStore(EventLoop& loop, std::weak_ptr<MeetingLinks> links, ListedAddresses listed,
                         std::function<void(const std::string&)> on_look)
    : loop_(loop),
      links_(std::move(links)),
      listed_(std::move(listed)),
      on_look_(std::move(on_look)) {
  lookForPlace();
}

ListedStore::~ListedStore() {
  if (place_) close(place_);
}

bool ListedStore::onLoop(std::function<void(MeetingLinks&)> task) {
  return loop_.post([links = links_, task = std::move(task)] {
    if (const auto alive = links.lock()) task(*alive);
  });
}

std::shared_ptr<ListedStore::Place> ListedStore::openLink(const SocketAddress& address) {
  auto place = std::make_shared<Place>(address);
  MeetingLinks::Events events;
  events.on_met = [place](const Standing& standing) {
    const MutexLock lock(place->mutex);
    place->met = true;
    place->standing = standing;
    place->changed.notifyAll();
  };
  events.on_answer = [place](uint64_t number, const StoreAnswer& answer) {
    const MutexLock lock(place->mutex);
    if (number != place->last_call) return;
    place->answer = answer;
    place->changed.notifyAll();
  };
  events.on_end = [place](const std::string& why) {
    const MutexLock lock(place->mutex);
    place->ended = why;
    place->changed.notifyAll();
  };
  const bool posted = onLoop([place, events = std::move(events)](MeetingLinks& links) {
    links.open(place->link, place->address, events);
  });
  if (!posted) throw StoreError("this member has ended");
  return place;
}

void ListedStore::close(const std::shared_ptr<Place>& place) {
  onLoop([link = place->link](MeetingLinks& links) { links.close(link); });
}

// All at once; who has answered shortly after the first one counts. Of equal ones the first.
void ListedStore::lookForPlace() {
  looked_at_ = Clock::now();
  std::vector<std::shared_ptr<Place>> tried;
  for (const SocketAddress& address : listed_()) tried.push_back(openLink(address));
  Deadline deadline = Deadline::after(kMeetWithin);
  for (const auto& one : tried) {
    one->awaitMeeting(deadline);
    if (one->hasMet()) deadline = deadline.orEarlier(kOthersWithin);
  }
  std::shared_ptr<Place> chosen;
  std::string why;
  for (const auto& one : tried) {
    if (one->hasMet() && (!chosen || one->standingNow() > chosen->standingNow())) chosen = one;
    if (!one->hasMet()) why += (why.empty() ? "" : "; ") + one->whyNot();
  }
  if (on_look_) on_look_(why);
  const bool stays = place_ && chosen && place_->hasMet() && chosen->address == place_->address;
  for (const auto& one : tried) {
    if (one != chosen || stays) close(one);
  }
  if (stays) return;
  if (place_) close(place_);
  place_ = chosen;
  looked_at_ = Clock::now();
  if (!place_) throw StoreError("none of the listed members can be met: " + why);
}

void ListedStore::lookAgain(Duration at_most_every) {
  if (place_ && place_->standingNow().part == Standing::Part::kMember) return;
  if (!place_ || Clock::now() - looked_at_ >= at_most_every) lookForPlace();
}

StoreAnswer ListedStore::call(StoreCall call) {
  Place& place = *place_;
  uint64_t number = 0;
  {
    const MutexLock lock(place.mutex);
    number = ++place.last_call;
    place.answer.reset();
  }
  onLoop([link = place.link, number, call = std::move(call)](MeetingLinks& links) {
    links.call(link, number, call);
  });
  const Deadline deadline = Deadline::after(kAnswerWithin);
  const MutexLock lock(place.mutex);
  while (!place.answer && !place.ended && !deadline.expired()) {
    place.changed.waitUntil(place.mutex, deadline);
  }
  if (place.answer) return *std::move(place.answer);
  throw StoreError("the member at " + place.address.toString() + " does not answer any more" +
                   (place.ended ? ": " + *place.ended : std::string()));
}

void ListedStore::set(const std::string& key, const std::string& value) {
  StoreCall set;
  set.what = StoreCall::What::kSet;
  set.keys = {key};
  set.value = value;
  call(std::move(set));
}

std::optional<std::vector<std::string>> ListedStore::getAll(const std::vector<std::string>& keys) {
  lookAgain(kBetweenLooks);
  StoreCall get;
  get.keys = keys;
  StoreAnswer answer = call(std::move(get));
  if (answer.status != StoreAnswer::Status::kOk) return std::nullopt;
  return std::move(answer.values);
}

void ListedStore::remove(const std::string& key) {
  StoreCall remove;
  remove.what = StoreCall::What::kRemove;
  remove.keys = {key};
  call(std::move(remove));
}

// What founds a job is written where it would be looked for now.
std::string ListedStore::compareSet(const std::string& key, const std::string& expected,
                                    const std::string& desired) {
  const SocketAddress before = place_->address;
  lookAgain(Duration::zero());
  if (place_->address != before) throw StoreError("the job's processes meet elsewhere by now");
  StoreCall compare;
  compare.what = StoreCall::What::kCompareSet;
  compare.keys = {key};
  compare.expected = expected;
  compare.value = desired;
  const StoreAnswer answer = call(std::move(compare));
  return answer.values.empty() ? std::string() : answer.values.front();
}

int64_t ListedStore::add(const std::string& key, int64_t amount) {
  StoreCall add;
  add.what = StoreCall::What::kAdd;
  add.keys = {key};
  add.amount = amount;
  return call(std::move(add)).number;
}

}  // namespace torchft_ext
