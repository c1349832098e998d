#include "sim_faults.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

namespace torchft_ext::sim {
namespace {

const std::map<std::string, FaultAction> kActions = {
    {"hang", FaultAction::kHang},
    {"delay", FaultAction::kDelay},
    {"fail", FaultAction::kFail},
    {"async_error", FaultAction::kAsyncError},
    {"in_progress", FaultAction::kInProgress},
    {"block", FaultAction::kBlock},
};
const std::vector<std::string> kPoints = {
    "any",       "init",     "allreduce",  "broadcast", "reduce",     "allgather", "reduce_scatter",
    "send",      "recv",     "finalize",   "destroy",   "abort",      "revoke",    "unique_id",
    "group_end", "register", "deregister", "lend",      "lend_event", "record"};

void setKey(Fault& fault, const std::string& key, int value) {
  const std::map<std::string, int*> keys = {{"rank", &fault.rank},
                                            {"count", &fault.count},
                                            {"code", &fault.code},
                                            {"polls", &fault.polls},
                                            {"ms", &fault.ms}};
  const auto found = keys.find(key);
  if (found == keys.end()) throw std::invalid_argument("unknown key of a fault: " + key);
  *found->second = value;
}

Fault parse(const std::string& action, std::istringstream& rest) {
  Fault fault;
  const auto found = kActions.find(action);
  if (found == kActions.end()) throw std::invalid_argument("unknown fault: " + action);
  fault.action = found->second;
  if (fault.action == FaultAction::kDelay) fault.ms = 10;
  rest >> fault.point;
  if (std::find(kPoints.begin(), kPoints.end(), fault.point) == kPoints.end())
    throw std::invalid_argument("unknown point of a fault: " + fault.point);
  for (std::string word; rest >> word;) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos) throw std::invalid_argument("expected key=value: " + word);
    setKey(fault, word.substr(0, equals), std::stoi(word.substr(equals + 1)));
  }
  return fault;
}

}  // namespace

Faults& Faults::instance() {
  static auto* const faults = new Faults;  // stream threads outlive static destructors
  return *faults;
}

void Faults::inject(const std::string& line) {
  std::istringstream words(line);
  std::string action;
  words >> action;
  if (action == "clear") {
    MutexLock lock(mutex_);
    faults_.clear();
    ++clears_;
    cleared_.notifyAll();
  } else if (action == "version") {
    MutexLock lock(mutex_);
    words >> version_;
  } else {
    Fault fault = parse(action, words);
    MutexLock lock(mutex_);
    faults_.push_back(std::move(fault));
  }
}

std::optional<Fault> Faults::take(FaultAction action, const std::string& point, int rank) {
  MutexLock lock(mutex_);
  for (auto it = faults_.begin(); it != faults_.end(); ++it) {
    const bool here = it->point == point || it->point == "any";
    if (it->action != action || !here || (it->rank >= 0 && it->rank != rank)) continue;
    Fault taken = *it;
    if (it->count > 0 && --it->count == 0) faults_.erase(it);
    return taken;
  }
  return std::nullopt;
}

void Faults::pause(const std::string& point, int rank) {
  const std::optional<Fault> fault = take(FaultAction::kBlock, point, rank);
  if (!fault) return;
  const Deadline deadline = Deadline::after(milliseconds(fault->ms));
  MutexLock lock(mutex_);
  const uint64_t clears = clears_;
  while (clears_ == clears && !deadline.expired()) cleared_.waitUntil(mutex_, deadline);
}

bool Faults::armed(const std::string& point) const {
  MutexLock lock(mutex_);
  return std::any_of(faults_.begin(), faults_.end(),
                     [&](const Fault& fault) { return fault.point == point; });
}

int Faults::version() const {
  MutexLock lock(mutex_);
  return version_;
}

void Faults::violation(const std::string& what) {
  MutexLock lock(mutex_);
  violations_.push_back(what);
}

std::vector<std::string> Faults::violations() const {
  MutexLock lock(mutex_);
  return violations_;
}

void Faults::count(const std::string& name, int64_t delta) {
  MutexLock lock(mutex_);
  counts_[name] += delta;
}

int64_t Faults::counted(const std::string& name) const {
  MutexLock lock(mutex_);
  const auto found = counts_.find(name);
  return found == counts_.end() ? 0 : found->second;
}

std::map<std::string, int64_t> Faults::counts() const {
  MutexLock lock(mutex_);
  return counts_;
}

void Faults::reset() {
  inject("clear");
  MutexLock lock(mutex_);
  version_ = 22809;
  violations_.clear();
  std::erase_if(counts_, [](const auto& entry) { return entry.first.rfind("live_", 0) != 0; });
}

}  // namespace torchft_ext::sim
