// Four processes without Python train a network on handwritten digits; one is killed in mid-step,
// and the others go on. No process is restarted; every step counts on all members or on none.
//
//   train [--data digits.csv] [--workers 4] [--steps 300] [--kill-at 100]
//
// The program starts its workers itself: the same binary, each a member of one elastic job. Its
// last line is JSON. Exit status 0: the steps were done, the members' states are equal, and the
// network reads digits.
#include <torch/torch.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "processes.h"
#include "torchft_ext/torch/ddp.h"
#include "torchft_ext/torch/elastic.h"

using example::Arguments;
using torchft_ext::ProcessGroupPtr;
namespace elastic = torchft_ext::elastic;

namespace {

constexpr int64_t kPixels = 64;
constexpr int64_t kDigits = 10;
constexpr int64_t kBatch = 64;                     // of all members together
constexpr int64_t kForTest = 297;                  // the last lines
constexpr std::chrono::milliseconds kByTheJob{0};  // the job's own timeout

struct Digits {
  torch::Tensor images;  // [n, 64], 0 to 1
  torch::Tensor labels;  // [n]
};

Digits load(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  std::vector<float> pixels;
  std::vector<int64_t> labels;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream numbers(line);
    std::string number;
    for (int64_t i = 0; i < kPixels; ++i) {
      std::getline(numbers, number, ',');
      pixels.push_back(std::stof(number) / 16);
    }
    std::getline(numbers, number, ',');
    labels.push_back(std::stoll(number));
  }
  const auto count = static_cast<int64_t>(labels.size());
  return {torch::tensor(pixels).reshape({count, kPixels}), torch::tensor(labels)};
}

torch::nn::Sequential makeNetwork() {
  torch::manual_seed(0);
  return torch::nn::Sequential(torch::nn::Linear(kPixels, 64), torch::nn::ReLU(),
                               torch::nn::Linear(64, kDigits));
}

// From a member that has them; false: another member was lost meanwhile.
bool share(torch::nn::Sequential& network, int64_t& step, const elastic::View& view,
           const ProcessGroupPtr& group) {
  torch::NoGradGuard no_grad;
  torch::Tensor number = torch::tensor({step});
  std::vector<torch::Tensor> all = network->parameters();
  all.push_back(number);
  for (torch::Tensor& tensor : all) {
    std::vector<torch::Tensor> one{tensor};
    c10d::BroadcastOptions options;
    options.rootRank = view.source();
    if (torchft_ext::tryWait(*group->broadcast(one, options))) return false;
  }
  step = number.item<int64_t>();
  return true;
}

double accuracy(torch::nn::Sequential& network, const Digits& digits) {
  torch::NoGradGuard no_grad;
  const int64_t first = digits.labels.size(0) - kForTest;
  const torch::Tensor found = network->forward(digits.images.slice(0, first)).argmax(1);
  return found.eq(digits.labels.slice(0, first)).to(torch::kDouble).mean().item<double>();
}

// ---- one member

class Worker {
 public:
  explicit Worker(const Arguments& arguments)
      : digits_(load(arguments.at("data"))),
        steps_(std::stoll(arguments.at("steps"))),
        kill_at_(std::stoll(arguments.at("kill-at"))),
        number_(std::stoi(arguments.at("worker"))),
        reports_(arguments.at("reports")),
        network_(makeNetwork()),
        optimizer_(network_->parameters(), torch::optim::SGDOptions(0.3)),
        group_(elastic::makeLocalGroup()),
        ddp_(network_, group_) {
    elastic::JoinOptions options;
    options.address = arguments.at("address");
    options.size = std::stoi(arguments.at("workers"));
    job_ = elastic::Job::join(options);
    job_->manage("default", group_);
  }

  void run() {
    recover();
    while (step_ < steps_) {
      const bool ok = computeGradients();
      const bool last = step_ + 1 == steps_;
      const elastic::Answer answer = job_->agree(ok, "", kByTheJob, {}, last);
      if (answer.ok) {
        optimizer_.step();
        job_->countSteps(++step_);  // for `python -m torchft_ext.elastic status`
      }
      if (answer.ok && answer.last) break;
      if (!answer.ok || job_->isOver() || answer.changes()) recover();
    }
    job_->end();  // a process that comes later is told so
    report();
    job_->leave();
  }

 private:
  void recover() {
    do {
      view_ = job_->recover();
    } while (!share(network_, step_, view_, group_));
    std::ostringstream line;
    line << "worker " << number_ << ": view " << view_.number << ", rank " << view_.rank << " of "
         << view_.size << ", at step " << step_ << "\n";
    std::cerr << line.str();
  }

  // The mean over all members; false: one was lost.
  bool computeGradients() {
    const int64_t count = digits_.labels.size(0) - kForTest;
    const int64_t own = kBatch / view_.size;
    const int64_t begin = (step_ * kBatch + own * view_.rank) % (count - own);
    const torch::Tensor images = digits_.images.slice(0, begin, begin + own);
    const torch::Tensor labels = digits_.labels.slice(0, begin, begin + own);
    optimizer_.zero_grad();
    try {
      const torch::Tensor out = ddp_.forward([&] { return network_->forward(images); });
      const torch::Tensor loss = torch::nn::functional::cross_entropy(out, labels);
      if (number_ == 1 && step_ == kill_at_) ::kill(::getpid(), SIGKILL);  // others wait for it
      loss.backward();
      return true;
    } catch (const torchft_ext::CommError& error) {
      std::cerr << "worker " + std::to_string(number_) + ": " + error.failure().describe() + "\n";
      return false;
    }
  }

  void report() {
    double sum = 0;
    for (const torch::Tensor& parameter : network_->parameters()) {
      sum += parameter.to(torch::kDouble).abs().sum().item<double>();
    }
    std::ofstream file(reports_ + "/" + std::to_string(number_));
    file.precision(17);
    file << step_ << " " << view_.size << " " << view_.number << " " << sum << " "
         << accuracy(network_, digits_) << "\n";
  }

  const Digits digits_;
  const int64_t steps_;
  const int64_t kill_at_;
  const int number_;
  const std::string reports_;
  torch::nn::Sequential network_;
  torch::optim::SGD optimizer_;
  const ProcessGroupPtr group_;
  torchft_ext::DistributedDataParallel ddp_;  // follows the group through its views
  std::shared_ptr<elastic::Job> job_;
  elastic::View view_;
  int64_t step_ = 0;
};

// ---- the program that starts them

int launch(const Arguments& given) {
  const example::Meeting meeting;
  Arguments arguments = given;
  arguments["address"] = meeting.address("digits");
  arguments["reports"] = meeting.directory();
  const int workers = std::stoi(arguments.at("workers"));
  const bool kills = std::stoll(arguments.at("kill-at")) >= 0 && workers > 1;
  std::vector<pid_t> pids;
  for (int i = 0; i < workers; ++i) {
    arguments["worker"] = std::to_string(i);
    pids.push_back(example::start(arguments));
  }
  bool good = true;
  std::string state;
  for (int i = 0; i < workers; ++i) {
    int status = 0;
    ::waitpid(pids[static_cast<size_t>(i)], &status, 0);
    if (kills && i == 1) {
      good = good && example::wasKilled(status);
      continue;
    }
    std::ifstream file(meeting.directory() + "/" + std::to_string(i));
    std::string line;
    good = good && status == 0 && std::getline(file, line) && (state.empty() || state == line);
    state = line;
  }
  std::istringstream fields(state);
  int64_t steps = 0;
  int64_t members = 0;
  int64_t views = 0;
  double sum = 0;
  double read = 0;
  fields >> steps >> members >> views >> sum >> read;
  good = good && steps == std::stoll(arguments.at("steps")) &&
         members == workers - (kills ? 1 : 0) && read > 0.85;
  std::cout << "{\"example\": \"train\", \"steps\": " << steps << ", \"members\": " << members
            << ", \"views\": " << views << ", \"accuracy\": " << read
            << ", \"states_equal\": " << (good ? "true" : "false") << "}" << std::endl;
  return good ? 0 : 1;
}

void work(const Arguments& arguments) {
  Worker(arguments).run();
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments defaults{
      {"data", "digits.csv"}, {"workers", "4"}, {"steps", "300"}, {"kill-at", "100"}};
  return example::run({"train",
                       "[--data digits.csv] [--workers 4] [--steps 300] [--kill-at 100]\n"
                       "--kill-at -1: nobody is killed",
                       defaults, launch, work},
                      argc, argv);
}
