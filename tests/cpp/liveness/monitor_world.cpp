#include "cpp/liveness/monitor_world.h"

#include <algorithm>

#include "cpp/liveness/monitor_process.h"

namespace torchft_ext {

MonitorWorld::MonitorWorld(const WorldOptions& options) : options_(options), random_(options.seed) {
  for (int number = 0; number < options.processes; ++number) {
    Incarnation id;
    for (uint8_t& byte : id.bytes) byte = static_cast<uint8_t>(random(256));
    numbers_[id] = number;
    processes_.push_back(std::make_unique<Process>(*this, number, id));
  }
}

MonitorWorld::~MonitorWorld() = default;

Duration MonitorWorld::delay() {
  const bool lost = options_.lost_per_mille > 0 && random(1000) < options_.lost_per_mille;
  const Duration shortest =
      options_.shortest_delay + (lost ? options_.resent_after : Duration::zero());
  const Duration range = options_.longest_delay - options_.shortest_delay;
  if (range == Duration::zero()) return shortest;
  // Mostly short, now and then long: so that news overtake each other on different ways.
  const double part = static_cast<double>(random(1000)) / 1000;
  return shortest + std::chrono::duration_cast<Duration>(range * part * part * part);
}

void MonitorWorld::pass(Duration time) {
  const Time until = now_ + time;
  while (!events_.empty() && events_.begin()->first <= until) {
    now_ = std::max(now_, events_.begin()->first);
    const Event event = std::move(events_.begin()->second);
    events_.erase(events_.begin());
    event();
  }
  now_ = until;
}

int MonitorWorld::beginGeneration(const std::vector<int>& members, Duration spread) {
  const int number = static_cast<int>(generations_.size());
  Generation generation;
  for (uint8_t& byte : generation.nonce.bytes) byte = static_cast<uint8_t>(random(256));
  generation.members = members;
  for (const int member : members) generation.broken = generation.broken || !runs(member);
  generations_.push_back(std::move(generation));
  for (const int member : members) {
    const double part = static_cast<double>(random(1000)) / 1000;
    later(std::chrono::duration_cast<Duration>(spread * part), [this, number, member] {
      at(member).receive([this, number, member] { at(member).beginGeneration(number); });
    });
  }
  return number;
}

void MonitorWorld::abort(int number, int member) {
  Process& process = at(member);
  if (!runs(member) || !process.takesPart(number) || toldOf(number, member) != nullptr) return;
  Generation& generation = generations_[static_cast<size_t>(number)];
  generation.broken = true;
  generation.aborters.insert(member);
  Failure failure;
  failure.kind = FailureKind::kAborted;
  const auto place = std::find(generation.members.begin(), generation.members.end(), member);
  failure.cause.rank = static_cast<int>(place - generation.members.begin());
  failure.cause.how = "abort() was called";
  told_[{number, member}] = {failure, 0};
  process.propagation().announce(now_, static_cast<WatchId>(number), failure);
}

void MonitorWorld::leaveGeneration(int generation, int member) {
  if (runs(member) && at(member).takesPart(generation)) at(member).removeWatch(generation);
}

void MonitorWorld::exit(int process) {
  if (!runs(process)) return;
  ever_exited_.insert(process);
  at(process).exit();
}

void MonitorWorld::breakGenerationsWith(int process) {
  for (size_t number = 0; number < generations_.size(); ++number) {
    Generation& generation = generations_[number];
    if (at(process).takesPart(static_cast<int>(number))) generation.broken = true;
  }
}

void MonitorWorld::kill(int process) {
  if (at(process).state() == Process::State::kEnded) return;
  breakGenerationsWith(process);
  ever_killed_.insert(process);
  at(process).end();
}

void MonitorWorld::freeze(int process) {
  if (!runs(process)) return;
  frozen_[process].push_back({now_});
  at(process).freeze();
}

void MonitorWorld::thaw(int process) {
  if (!frozen(process)) return;
  frozen_[process].back().to = now_;
  at(process).thaw();
}

void MonitorWorld::cutConnection(int a, int b) {
  ever_cut_.insert(pairOf(a, b));
  for (const LivenessKind kind : {LivenessKind::kMain, LivenessKind::kBackup}) {
    at(a).cut(b, kind);
    at(b).cut(a, kind);
  }
}

void MonitorWorld::blockPair(int a, int b) {
  if (!isBlocked(a, b)) blocked_[pairOf(a, b)].push_back({now_});
  cutConnection(a, b);
}

void MonitorWorld::unblockPair(int a, int b) {
  if (isBlocked(a, b)) blocked_[pairOf(a, b)].back().to = now_;
}

void MonitorWorld::mutePair(int a, int b) {
  blocked_[pairOf(a, b)].push_back({now_});
  ever_cut_.insert(pairOf(a, b));
  muted_.insert(pairOf(a, b));
}

bool MonitorWorld::isBlocked(int a, int b) const {
  const auto found = blocked_.find(pairOf(a, b));
  return found != blocked_.end() && found->second.back().to == Time::max();
}

bool MonitorWorld::runs(int process) const {
  return at(process).state() == Process::State::kRuns;
}

bool MonitorWorld::frozen(int process) const {
  return at(process).state() == Process::State::kFrozen;
}

int MonitorWorld::connections(int process) const {
  return at(process).mainConnections();
}

uint64_t MonitorWorld::noticesSent() const {
  uint64_t sent = 0;
  for (const auto& process : processes_) sent += process->propagation().counts().notices_sent;
  return sent;
}

const std::vector<int>& MonitorWorld::membersOf(int generation) const {
  return generations_[static_cast<size_t>(generation)].members;
}

const Failure* MonitorWorld::toldOf(int generation, int member) const {
  const auto found = told_.find({generation, member});
  return found == told_.end() ? nullptr : &found->second.failure;
}

std::optional<int> MonitorWorld::hopsTo(int generation, int member) const {
  const auto found = told_.find({generation, member});
  return found == told_.end() ? std::nullopt : std::optional<int>(found->second.hops);
}

int MonitorWorld::generationOf(const Nonce& nonce) const {
  const auto found =
      std::find_if(generations_.begin(), generations_.end(),
                   [&](const Generation& generation) { return generation.nonce == nonce; });
  return static_cast<int>(found - generations_.begin());
}

std::vector<int> MonitorWorld::survivorsOf(int generation) const {
  std::vector<int> survivors;
  for (const int member : membersOf(generation)) {
    if (runs(member) && at(member).takesPart(generation)) survivors.push_back(member);
  }
  return survivors;
}

bool MonitorWorld::isBroken(int generation) const {
  const std::vector<int> survivors = survivorsOf(generation);
  return generations_[static_cast<size_t>(generation)].broken ||
         std::any_of(survivors.begin(), survivors.end(),
                     [&](int member) { return toldOf(generation, member) != nullptr; });
}

std::vector<MonitorWorld::Pair> MonitorWorld::blocked() const {
  std::vector<Pair> blocked;
  for (int generation = 0; generation < static_cast<int>(generations_.size()); ++generation) {
    if (!isBroken(generation)) continue;
    for (const int member : survivorsOf(generation)) {
      if (toldOf(generation, member) == nullptr) blocked.emplace_back(generation, member);
    }
  }
  return blocked;
}

size_t MonitorWorld::generationsKept(int process) const {
  return at(process).propagation().generations();
}

}  // namespace torchft_ext
