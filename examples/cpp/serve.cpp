// An inference server's tensor-parallel products without Python: three processes hold a third of
// each layer, a fourth is a spare. One dies while it computes. The requests in flight fail with its
// name, the spare takes its place, and requests go on.
//
//   serve [--workers 3] [--spares 1] [--requests 400] [--kill-at 200]
//
// The program starts its processes itself. Requests come in windows; the members agree after each
// one, so that all of them know whether it was answered. Its last line is JSON. Exit status 0:
// every request was answered rightly, or failed with the name of the process that died.
#include <torch/torch.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "processes.h"
#include "torchft_ext/torch/elastic.h"

using example::Arguments;
using torchft_ext::FailurePtr;
using torchft_ext::ProcessGroupPtr;
namespace elastic = torchft_ext::elastic;

namespace {

constexpr int64_t kInputs = 128;
constexpr int64_t kHidden = 512;
constexpr int64_t kOutputs = 64;
constexpr int64_t kRows = 8;    // of a request
constexpr int64_t kWindow = 8;  // requests in flight

// Every process can read the whole model, as from a disk, and keeps the part of its rank.
struct Model {
  torch::Tensor in;   // [inputs, hidden], split by columns
  torch::Tensor out;  // [hidden, outputs], split by rows

  static Model load() {
    torch::manual_seed(0);
    return {torch::randn({kInputs, kHidden}) / 12, torch::randn({kHidden, kOutputs}) / 23};
  }
  Model part(int rank, int size) const {
    return {in.tensor_split(size, 1)[static_cast<size_t>(rank)].contiguous(),
            out.tensor_split(size, 0)[static_cast<size_t>(rank)].contiguous()};
  }
  // Of a part: what is to be added up over all parts.
  torch::Tensor operator()(const torch::Tensor& x) const { return x.mm(in).relu().mm(out); }
};

// What a client sends; only the front has it.
torch::Tensor request(int64_t number) {
  torch::manual_seed(static_cast<uint64_t>(number));
  return torch::randn({kRows, kInputs});
}

class Worker {
 public:
  explicit Worker(const Arguments& arguments)
      : requests_(std::stoll(arguments.at("requests"))),
        kill_at_(std::stoll(arguments.at("kill-at"))),
        report_(arguments.at("report")) {
    elastic::JoinOptions options;
    options.address = arguments.at("address");
    options.size = options.min_size = options.max_size = std::stoi(arguments.at("workers"));
    job_ = elastic::Job::join(options);  // a spare waits here
    job_->manage("default", group_);
  }

  void run() {
    recover();
    while (next_ < requests_) {
      const FailurePtr failure = serveWindow();
      const elastic::Answer answer = job_->agree(!failure);
      count(answer.ok, failure);
      if (!answer.ok || job_->isOver() || !answer.lost.empty()) recover();
    }
    if (isFront()) report();
    job_->leave();
  }

 private:
  // It takes requests in and gives answers: a member that was there before.
  bool isFront() const { return view_.rank == view_.source(); }

  // The next view, with a spare in the place of who is lost; it learns where the others are.
  void recover() {
    FailurePtr failure;
    do {
      view_ = job_->recover();
      std::vector<torch::Tensor> counts{torch::tensor({next_, answered_, failed_, wrong_})};
      c10d::BroadcastOptions options;
      options.rootRank = view_.source();
      failure = torchft_ext::tryWait(*group_->broadcast(counts, options));
      if (failure) continue;
      next_ = counts[0][0].item<int64_t>();
      answered_ = counts[0][1].item<int64_t>();
      failed_ = counts[0][2].item<int64_t>();
      wrong_ = counts[0][3].item<int64_t>();
    } while (failure);
    part_ = model_.part(view_.rank, view_.size);
    std::ostringstream line;
    line << "process " << ::getpid() << ": view " << view_.number << ", rank " << view_.rank
         << " of " << view_.size << ", from request " << next_ << "\n";
    std::cerr << line.str();
  }

  // Of all requests in flight; null: all are answered.
  FailurePtr serveWindow() {
    const int64_t end = std::min(next_ + kWindow, requests_);
    std::vector<std::vector<torch::Tensor>> sums;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int64_t number = next_; number < end; ++number) {
      std::vector<torch::Tensor> x{isFront() ? request(number) : torch::empty({kRows, kInputs})};
      c10d::BroadcastOptions options;
      options.rootRank = view_.source();
      if (const FailurePtr lost = torchft_ext::tryWait(*group_->broadcast(x, options))) return lost;
      if (number == kill_at_ && view_.number == 1 && view_.rank == view_.size - 1) {
        ::kill(::getpid(), SIGKILL);  // the others wait for its part
      }
      sums.push_back({part_(x[0])});
      works.push_back(group_->allreduce(sums.back()));  // the next product begins meanwhile
    }
    FailurePtr failure;
    for (const auto& work : works) {
      const FailurePtr found = torchft_ext::tryWait(*work);
      if (!failure) failure = found;
    }
    if (!failure && isFront()) check(sums);
    return failure;
  }

  void check(const std::vector<std::vector<torch::Tensor>>& sums) {
    for (size_t i = 0; i < sums.size(); ++i) {
      const torch::Tensor whole = model_(request(next_ + static_cast<int64_t>(i)));
      if (!sums[i][0].allclose(whole, 1e-3, 1e-4)) ++wrong_;
    }
  }

  void count(bool answered, const FailurePtr& failure) {
    const int64_t served = std::min(kWindow, requests_ - next_);
    (answered ? answered_ : failed_) += served;
    if (!answered && isFront()) {
      std::cerr << "requests " << next_ << " to " << next_ + served - 1 << " failed: "
                << (failure ? failure->describe() : "another worker reports a failure") << "\n";
      if (failure) lost_ = failure->cause.pid;
    }
    next_ += served;
  }

  void report() const {
    std::ofstream file(report_);
    file << answered_ << " " << failed_ << " " << wrong_ << " " << view_.size << " " << view_.number
         << " " << lost_ << "\n";
  }

  const int64_t requests_;
  const int64_t kill_at_;
  const std::string report_;
  const Model model_ = Model::load();
  const ProcessGroupPtr group_ = elastic::makeLocalGroup();
  std::shared_ptr<elastic::Job> job_;
  elastic::View view_;
  Model part_;
  int64_t next_ = 0;
  int64_t answered_ = 0;
  int64_t failed_ = 0;
  int64_t wrong_ = 0;
  int64_t lost_ = -1;  // the process that died, as the failure names it
};

// ---- the program that starts them

// One line of JSON about what the front reported; true: all is as it should be.
bool conclude(const Arguments& arguments, pid_t killed) {
  std::ifstream file(arguments.at("report"));
  int64_t answered = 0;
  int64_t failed = 0;
  int64_t wrong = 0;
  int64_t workers = 0;
  int64_t views = 0;
  int64_t lost = -1;
  file >> answered >> failed >> wrong >> workers >> views >> lost;
  const bool kills = std::stoll(arguments.at("kill-at")) >= 0;
  const bool good = answered + failed == std::stoll(arguments.at("requests")) && wrong == 0 &&
                    workers == std::stoll(arguments.at("workers")) && (failed > 0) == kills &&
                    lost == killed;
  std::cout << "{\"example\": \"serve\", \"answered\": " << answered << ", \"failed\": " << failed
            << ", \"wrong\": " << wrong << ", \"workers\": " << workers << ", \"views\": " << views
            << ", \"named_the_lost\": " << (good && kills ? "true" : "false") << "}" << std::endl;
  return good;
}

int launch(const Arguments& given) {
  const int kills = std::stoll(given.at("kill-at")) >= 0 ? 1 : 0;
  const int workers = std::stoi(given.at("workers"));
  const int count = workers + std::stoi(given.at("spares"));
  if (workers < 2 || count < workers + kills) {
    throw std::runtime_error("expected two workers or more, and a spare for one that is killed");
  }
  const example::Meeting meeting;
  Arguments arguments = given;
  arguments["address"] = meeting.address("serve");
  arguments["report"] = meeting.directory() + "/front";
  arguments["worker"] = "";
  std::vector<pid_t> pids;
  for (int i = 0; i < count; ++i) pids.push_back(example::start(arguments));
  pid_t killed = -1;
  bool good = true;
  for (int ended = 0; ended < workers + kills; ++ended) {  // spares that nobody needed wait on
    int status = 0;
    const pid_t pid = ::wait(&status);
    pids.erase(std::find(pids.begin(), pids.end(), pid));
    if (example::wasKilled(status)) {
      killed = pid;
    } else {
      good = good && status == 0;
    }
  }
  for (const pid_t pid : pids) ::kill(pid, SIGKILL);
  good = conclude(arguments, killed) && good;
  return good ? 0 : 1;
}

void work(const Arguments& arguments) {
  Worker(arguments).run();
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments defaults{
      {"workers", "3"}, {"spares", "1"}, {"requests", "400"}, {"kill-at", "200"}};
  return example::run({"serve",
                       "[--workers 3] [--spares 1] [--requests 400] [--kill-at 200]\n"
                       "--kill-at -1: nobody is killed",
                       defaults, launch, work},
                      argc, argv);
}
