#include "cpp/programs/rank/rank_member.h"

#include <algorithm>
#include <stdexcept>
#include <thread>

#include "cpp/programs/rank/rank_report.h"
#include "host/process.h"

namespace torchft_ext {

RankMember::RankMember(const std::string& name, std::shared_ptr<Engine> engine,
                       std::shared_ptr<Watchdog> watchdog, std::shared_ptr<StoreThread> store)
    : name_(name),
      store_(std::move(store)),
      group_(std::make_shared<Group>(name.empty() ? "matrix" : name, std::move(engine),
                                     std::move(watchdog), std::chrono::seconds(60))),
      worker_("rank-worker") {
  rememberGroup(group_);
}

RankMember::~RankMember() {
  stop_loop_ = true;
  group_->abort("the rank quits");
  worker_.stop(Deadline::after(std::chrono::seconds(2)));
}

void RankMember::command(const std::string& name, std::istringstream& words) {
  if (actAtOnce(name, words)) return;
  std::string rest;
  std::getline(words, rest);
  worker_.post([this, name, rest] {
    std::istringstream arguments(rest);
    try {
      run(name, arguments);
    } catch (const std::exception& error) {
      say(name_, "error", "\"text\":" + quoted(error.what()));
    }
  });
}

bool RankMember::actAtOnce(const std::string& name, std::istringstream& words) {
  if (name == "abort") {
    abortEvenBetween();
  } else if (name == "shutdown") {
    leave();
  } else if (name == "timeout") {
    timeOut(words);
  } else if (name == "progress") {
    progress();
  } else {
    return false;
  }
  return true;
}

// A recv that nobody answers, with a limit of its own: its timeout is this rank's doing.
void RankMember::timeOut(std::istringstream& words) {
  int ms = 0;
  words >> ms;
  Operation recv;
  recv.kind = OpKind::kRecv;
  recv.peer = -1;
  recv.tag = 987654;
  recv.timeout = milliseconds(ms);
  recv.outputs = {{&never_, sizeof never_}};
  group_->issue(std::move(recv));
}

// In a loop of configure() it may fall between two of them: then once more.
void RankMember::abortEvenBetween() {
  do {
    group_->abort("the matrix said so");
    std::this_thread::sleep_for(milliseconds(1));
  } while (configuring_);
}

void RankMember::leave() {
  if (configuring_) {
    group_->shutdown(Deadline::after(std::chrono::seconds(10)));
    return;
  }
  stop_loop_ = true;
  worker_.post([this] {
    const bool left = group_->shutdown(Deadline::after(std::chrono::seconds(10)));
    say(name_, "left", std::string("\"ok\":") + (left ? "true" : "false"));
  });
}

void RankMember::progress() {
  say(name_, "progress",
      "\"rounds\":" + std::to_string(rounds_) + ",\"longest_us\":" + std::to_string(longest_us_));
}

void RankMember::run(const std::string& name, std::istringstream& words) {
  if (name == "configure") {
    configure(words);
  } else if (name == "loop" || name == "once") {
    operate(name == "loop", words);
  } else if (name == "check") {
    const bool unchanged = !operations_ || operations_->unchanged();
    say(name_, "checked", std::string("\"unchanged\":") + (unchanged ? "true" : "false"));
  } else {
    throw std::invalid_argument("unknown command " + name);
  }
}

void RankMember::configure(std::istringstream& words) {
  int timeout_ms = 0;
  words >> prefix_ >> rank_ >> size_ >> timeout_ms;
  stop_loop_ = false;
  limit_ = milliseconds(timeout_ms);
  const FailurePtr failure = group_->configure(store_, prefix_, rank_, size_, limit_);
  say(name_, "configured", failureFields(failure) + "," + nowField());
}

void RankMember::operate(bool loop, std::istringstream& words) {
  std::string operation;
  size_t elements = 0;
  int64_t pause_us = 0;
  words >> operation >> elements >> pause_us;
  if (operation == "configure") {
    configureAgainAndAgain();
    return;
  }
  operations_ = std::make_unique<RankOperations>(*group_, operation, elements);
  rounds_ = 0;
  longest_us_ = 0;
  FailurePtr failure;
  do {
    failure = runOnce();
  } while (loop && !failure && !stop_loop_ && pause(std::chrono::microseconds(pause_us)));
  const std::string when = nowField();
  operations_->mark();
  say(name_, loop ? "failed" : "done", failureFields(failure) + "," + when);
}

// True, for the sake of loops.
bool RankMember::pause(Duration time) {
  if (time > Duration::zero()) std::this_thread::sleep_for(time);
  return true;
}

FailurePtr RankMember::runOnce() {
  const auto began = Clock::now();
  FailurePtr failure = operations_->runOnce();
  if (failure) return failure;
  const auto took = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - began);
  longest_us_ = std::max<int64_t>(longest_us_, took.count());
  ++rounds_;
  return nullptr;
}

// configure() and a barrier, so that nobody begins anew before all are up. A generation that is
// lost as soon as it began counts too.
void RankMember::configureAgainAndAgain() {
  configuring_ = true;
  FailurePtr failure;
  for (int k = 0; !failure && !stop_loop_; ++k) {
    failure = lossOfGeneration();
    if (failure) break;
    try {
      failure = group_->configure(store_, prefix_ + "/" + std::to_string(k), rank_, size_, limit_);
    } catch (const GroupStateError&) {  // shut down between two of them
      break;
    }
    if (!failure) {
      failure = barrier();
      if (failure && isOwnAbort(*failure)) failure = nullptr;
    }
  }
  configuring_ = false;
  operations_.reset();
  say(name_, "failed", failureFields(failure) + "," + nowField());
}

FailurePtr RankMember::barrier() {
  Operation operation;
  operation.kind = OpKind::kBarrier;
  const auto state = group_->issue(std::move(operation));
  if (!state->wait(Deadline::after(std::chrono::seconds(120))))
    throw std::runtime_error("a barrier hangs");
  return state->failure();
}

// A strike between two configure(): the next one is to be struck.
bool RankMember::isOwnAbort(const Failure& failure) const {
  return failure.kind == FailureKind::kAborted && failure.cause.rank == rank_;
}

FailurePtr RankMember::lossOfGeneration() const {
  FailurePtr failure = group_->errored();
  return failure && failure->kind != FailureKind::kAborted ? failure : nullptr;
}

}  // namespace torchft_ext
