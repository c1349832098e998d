// A C++ process among those of mixed.py, which says the same in Python:
//   torchft_ext_mixed job PORT NUMBER FOUNDERS NEWCOMERS [die STEP | freeze STEP | leave STEP]
//     a member of an elastic job of both languages; who has a NUMBER of FOUNDERS or more is a
//     newcomer, and the job ends once all of these are in it
//   torchft_ext_mixed names PORT NAME      a member that manages its group under that name
//   torchft_ext_mixed first PORT           a member whose first operation is a broadcast
//   torchft_ext_mixed group PORT RANK      a rank of one group with a Python process
// and two of C++ alone, in one job:
//   torchft_ext_mixed leaves PORT          the second one leaves, while the first waits for it
//   torchft_ext_mixed absent PORT          it does not come to agree()
//   torchft_ext_mixed slow PORT            it does not come to an operation
// Exit status 0: what it looked at is right.
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "torchft_ext/torch/elastic.h"

namespace torchft_ext {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Words = std::vector<std::string>;

constexpr seconds kLimit{100};
constexpr seconds kSilence{1};  // of a member that is left out
constexpr milliseconds kStepTimeout{500};
constexpr int64_t kSteps = 60;

void require(bool good, const std::string& what) {
  if (!good) throw std::runtime_error("wrong: " + what);
}

void sum(const ProcessGroupPtr& group, at::Tensor& tensor) {
  std::vector<at::Tensor> one{tensor};
  group->allreduce(one)->wait();
}

void broadcast(const ProcessGroupPtr& group, at::Tensor& tensor, int root) {
  std::vector<at::Tensor> one{tensor};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  group->broadcast(one, options)->wait();
}

StorePtr storeAt(const std::string& port) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::stoi(port));
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

elastic::JoinOptions optionsFor(const std::string& port, int size) {
  elastic::JoinOptions options;
  options.address = "127.0.0.1:" + port + "/mixed";
  options.size = size;
  options.min_size = 1;
  options.limit = kSilence;
  options.timeout = kLimit;
  return options;
}

std::shared_ptr<elastic::Job> join(const std::string& port, int size) {
  return elastic::Job::join(optionsFor(port, size));
}

// ---- a member of a job

class Member {
 public:
  explicit Member(const Words& words)
      : number_(std::stoi(words.at(1))),
        founders_(std::stoi(words.at(2))),
        newcomers_(std::stoul(words.at(3))),
        ends_(words.size() > 4 ? words.at(4) : ""),
        ends_at_(words.size() > 5 ? std::stoll(words.at(5)) : -1),
        store_(storeAt(words.at(0))) {
    if (isNew()) store_->wait({kFounded}, kLimit);
    job_ = join(words.at(0), founders_);
    job_->manage("default", group_);
  }

  void run() {
    recover();
    store_->set(kFounded, std::vector<uint8_t>{1});
    for (;;) {
      const bool ok = compute();
      elastic::Answer answer;
      try {
        answer = job_->agree(ok, isNew() ? "new" : "", kLimit);
      } catch (const ElasticError& error) {  // it leaves, and the others have decided on a view
        if (error.kind() != ElasticErrorKind::kLeftOut || ends_ != "leave") throw;
        break;
      }
      if (answer.ok) {
        total_ += sum_.div(view_.size, "trunc");
        ++step_;
      }
      const auto& leaving = answer.leaving;
      if (std::find(leaving.begin(), leaving.end(), view_.rank) != leaving.end()) break;
      if (answer.ok && isEnd(answer)) break;
      if (!answer.ok || job_->isOver() || answer.changes()) recover();
    }
    // Of ones times step + 1 in each step, whoever took part.
    const int64_t expected = step_ * (step_ + 1) / 2;
    require(total_.eq(expected).all().item<bool>(), "the sum of all steps");
    require(step_ >= kSteps || ends_ == "leave", "the number of steps");
    job_->leave();
  }

 private:
  static constexpr const char* kFounded = "founded";

  bool isNew() const { return number_ >= founders_; }
  bool isEnd(const elastic::Answer& answer) const {
    const auto newcomers = std::count(answer.notes.begin(), answer.notes.end(), "new");
    return step_ >= kSteps && static_cast<size_t>(newcomers) == newcomers_;
  }

  void recover() {
    for (;;) {
      view_ = job_->recover(kLimit);
      try {
        at::Tensor step = at::full({1}, step_, at::kLong);
        broadcast(group_, step, view_.source());
        broadcast(group_, total_, view_.source());
        step_ = step.item<int64_t>();
        return;
      } catch (const CommError&) {  // another member is lost
      }
    }
  }

  bool compute() {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (ends_ == "die" && step_ == ends_at_) ::kill(::getpid(), SIGKILL);
    if (ends_ == "freeze" && step_ == ends_at_) ::kill(::getpid(), SIGSTOP);
    if (ends_ == "leave" && step_ == ends_at_) job_->setLeaving();
    sum_ = at::full({1000}, step_ + 1, at::kLong);
    const auto began = std::chrono::steady_clock::now();
    try {
      sum(group_, sum_);
      return true;
    } catch (const CommError& error) {
      const auto took = std::chrono::steady_clock::now() - began;
      require(took < 3 * kSilence, std::string("released late: ") + error.what());
      return false;
    }
  }

  const int number_;
  const int founders_;
  const size_t newcomers_;
  const std::string ends_;
  const int64_t ends_at_;
  const ProcessGroupPtr group_ = elastic::makeLocalGroup();
  const StorePtr store_;
  std::shared_ptr<elastic::Job> job_;
  elastic::View view_;
  int64_t step_ = 0;
  at::Tensor sum_;
  at::Tensor total_ = at::zeros({1000}, at::kLong);
};

// ---- members that cannot get on

// The error, which one of the members has after so many views at most; nothing: this one is alone
// by then.
std::string whyNot(elastic::Job& job, const ProcessGroupPtr& group, int& views) {
  for (views = 0; views < 10; ++views) {
    bool ok = true;
    try {
      if (job.recover(kLimit).size == 1) return "";
      at::Tensor tensor = at::ones({3});
      try {
        broadcast(group, tensor, 0);
      } catch (const CommError&) {
        ok = false;
      }
      require(!job.agree(ok).ok, "an agreement that is ok");
    } catch (const ElasticError& error) {
      require(error.kind() == ElasticErrorKind::kNoProgress, error.what());
      return error.what();
    }
  }
  throw std::runtime_error("the job goes on from view to view");
}

void expectStandstill(const std::string& port, const std::string& name, const Words& parts) {
  const auto group = elastic::makeLocalGroup();
  const auto job = join(port, 2);
  job->manage(name, group);
  int views = 0;
  const std::string text = whyNot(*job, group, views);
  for (const std::string& part : parts) {
    if (text.empty()) break;
    require(text.find(part) != std::string::npos, "'" + text + "' has no '" + part + "'");
  }
  require(views <= 3, "views: " + std::to_string(views));
  job->leave(std::chrono::milliseconds(100));
}

// ---- one of two members, of whom the first has to go on without the second

class OneOfTwo {
 public:
  explicit OneOfTwo(const std::string& port, std::optional<milliseconds> step_timeout = {})
      : store_(storeAt(port)) {
    elastic::JoinOptions options = optionsFor(port, 2);
    options.step_timeout = step_timeout;
    job_ = elastic::Job::join(options);
    job_->manage("default", group_);
    is_first_ = job_->recover().rank == 0;
  }

  void leaves() {
    if (is_first_) {
      store_->set(kInView, std::vector<uint8_t>{1});
      require(endsSoon([this] { return throwsIn<CommError>(); }), "the first is released");
      goOnAlone();
    } else {
      store_->wait({kInView}, kLimit);
      require(endsSoon([this] { return job_->leave(kLimit); }), "the second leaves at once");
    }
  }

  void isAbsent() {
    if (!is_first_) return beLeftOut();
    require(!job_->agree(true).ok, "a vote that is missing");
    goOnAlone();
  }

  void isSlow() {
    if (!is_first_) return beLeftOut();
    require(throwsIn<CommTimeoutError>(), "the operation's timeout");
    goOnAlone();
  }

 private:
  static constexpr const char* kInView = "in the view";
  static constexpr const char* kDone = "done";

  template <typename Error>
  bool throwsIn() {
    at::Tensor tensor = at::ones({3});
    try {
      sum(group_, tensor);
    } catch (const Error&) {
      return true;
    }
    return false;
  }
  // Before a wait that would end by its timeout.
  template <typename Do>
  static bool endsSoon(Do act) {
    const auto began = std::chrono::steady_clock::now();
    const bool good = act();
    return good && std::chrono::steady_clock::now() - began < kLimit / 10;
  }
  void goOnAlone() {
    require(job_->recover().size == 1, "the first goes on alone");
    store_->set(kDone, std::vector<uint8_t>{1});
    job_->leave();
  }
  void beLeftOut() {
    store_->wait({kDone}, kLimit);
    try {
      job_->recover();
    } catch (const ElasticError& error) {
      return require(error.kind() == ElasticErrorKind::kLeftOut, error.what());
    }
    require(false, "it is left out");
  }

  const StorePtr store_;
  const ProcessGroupPtr group_ = elastic::makeLocalGroup();
  std::shared_ptr<elastic::Job> job_;
  bool is_first_ = false;
};

// ---- a rank of a group

void expectSum(const ProcessGroupPtr& group, int64_t expected) {
  at::Tensor tensor = at::full({5}, group->getRank() + 1, at::kLong);
  sum(group, tensor);
  require(tensor.eq(expected).all().item<bool>(), "the sum");
}

void beInOneGroup(const std::string& port, int rank) {
  const auto store = storeAt(port);
  const auto group = makeGroup(store, rank, 2, {.name = "mixed", .timeout = kLimit});
  expectSum(group, 3);
  configure(group, "127.0.0.1:" + port + "/generation2", 1 - rank, 2);
  at::Tensor tensor = at::full({5}, static_cast<float>(group->getRank()));
  broadcast(group, tensor, 1);
  require(tensor.eq(1).all().item<bool>(), "the broadcast");
  shutdown(group);
  // One that Python has made by init_process_group(), of one rank.
  const auto other = makeUnformedGroup(c10::make_intrusive<c10d::HashStore>());
  configure(other, "127.0.0.1:" + port + "/other", rank, 2, kLimit);
  expectSum(other, 3);
  shutdown(other);
}

void run(const Words& words) {
  const Words rest(words.begin() + 1, words.end());
  const std::string& what = words.at(0);
  if (what == "job") return Member(rest).run();
  if (what == "names") {
    return expectStandstill(rest.at(0), rest.at(1), {"'default'", "'" + rest.at(1) + "'"});
  }
  if (what == "first") return expectStandstill(rest.at(0), "default", {"mismatch", "allreduce"});
  if (what == "leaves") return OneOfTwo(rest.at(0)).leaves();
  if (what == "absent") return OneOfTwo(rest.at(0), kStepTimeout).isAbsent();
  if (what == "slow") return OneOfTwo(rest.at(0), kStepTimeout).isSlow();
  if (what == "group") return beInOneGroup(rest.at(0), std::stoi(rest.at(1)));
  throw std::runtime_error("unknown: " + what);
}

}  // namespace
}  // namespace torchft_ext

int main(int argc, char** argv) {
  try {
    torchft_ext::run({argv + 1, argv + argc});
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "C++: " << error.what() << std::endl;
    return 1;
  }
}
