// Collectives of the CPU engine, timed in processes without Python and torch, as nccl-tests shows
// them: for each size the time, the algorithm's and the bus's bandwidth, and how many results are
// wrong.
//
// It starts its ranks itself. Times are rank 0's medians, each operation waited for before the
// next; "issue" is the time of the call alone. The last line is JSON.
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "torchft_ext/comm.h"

namespace {

using torchft_ext::Comm;
using torchft_ext::CommOptions;
using torchft_ext::DataType;
using torchft_ext::Reduction;
using Clock = std::chrono::steady_clock;
using Arguments = std::map<std::string, std::string>;

constexpr const char* kHelp =
    R"(usage: ft_bench [--world 4] [--op allreduce] [--min 4] [--max 64M] [--factor 4] [--seconds 0.3]

  --op       allreduce, broadcast, allgather, reduce_scatter, reduce, gather, scatter, alltoall, sendrecv,
             barrier, configure (a new generation of the same members), abort (until all waiters are
             released), or all
  --min,max  bytes: of the whole result for allgather, of the whole input for reduce_scatter, gather,
             scatter and alltoall; suffixes K, M, G
  --seconds  for each size
  --tcp      TCP alone, no local sockets
)";

size_t parseBytes(const std::string& text) {
  size_t end = 0;
  const auto number = static_cast<size_t>(std::stoull(text, &end));
  const std::string unit = text.substr(end);
  if (unit.empty()) return number;
  const size_t shift = unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : 0;
  if (shift == 0) throw std::invalid_argument("expected a number with K, M or G, found " + text);
  return number << shift;
}

double microseconds(Clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

struct Line {
  std::string op;
  size_t bytes = 0;
  size_t count = 0;
  double issue_us = 0;
  double time_us = 0;
  double algbw = 0;  // GB/s
  double busbw = 0;
  size_t wrong = 0;
  std::vector<double> times;  // of each round, in microseconds
};

// One rank's measurements. Items are floats; item i of rank r is r + i % 7.
class Bench {
 public:
  Bench(Comm& comm, std::shared_ptr<torchft_ext::Store> store, double seconds)
      : comm_(comm),
        store_(std::move(store)),
        rank_(comm.rank()),
        size_(comm.size()),
        seconds_(seconds) {}

  Line collective(const std::string& op, size_t bytes) {
    prepare(op, bytes);
    for (int i = 0; i < 3; ++i) once(op);
    const size_t rounds = agreeOnRounds(op);
    std::vector<double> issue;
    std::vector<double> whole;
    issue.reserve(rounds);
    whole.reserve(rounds);
    for (size_t i = 0; i < rounds; ++i) {
      const auto began = Clock::now();
      const auto request = begin(op);
      const auto issued = Clock::now();
      request.wait();
      whole.push_back(microseconds(Clock::now() - began));
      issue.push_back(microseconds(issued - began));
    }
    return lineOf(op, bytes, median(issue), std::move(whole));
  }

  // Members, ranks and sizes stay; the whole of configure() is timed.
  Line configure() {
    std::vector<double> took;
    for (int i = 0; i < 30; ++i) {
      comm_.barrier().wait();
      const auto began = Clock::now();
      comm_.configure(store_, "configure/" + std::to_string(next_++), rank_, size_);
      took.push_back(microseconds(Clock::now() - began));
    }
    return lineOf("configure", 0, 0, std::move(took));
  }

  // Rank 0 aborts while all wait for it: until its own call returns, and its waiter is released.
  Line abort() {
    std::vector<double> took;
    for (int i = 0; i < 20; ++i) {
      const auto waiting = rank_ == 0 ? comm_.recv(in_.data(), 0, DataType::kUint8, size_ - 1)
                                      : comm_.recv(in_.data(), 0, DataType::kUint8, 0);
      const auto began = Clock::now();
      if (rank_ == 0) comm_.abort("the benchmark");
      waiting.tryWait();
      took.push_back(microseconds(Clock::now() - began));
      comm_.configure(store_, "abort/" + std::to_string(next_++), rank_, size_);
    }
    return lineOf("abort", 0, 0, std::move(took));
  }

 private:
  using Request = torchft_ext::Request;
  static constexpr DataType kFloat = DataType::kFloat32;

  static float item(int rank, size_t i) {
    return static_cast<float>(rank) + static_cast<float>(i % 7);
  }

  bool splits(const std::string& op) const {
    return op == "allgather" || op == "reduce_scatter" || op == "gather" || op == "scatter" ||
           op == "alltoall";
  }

  void prepare(const std::string& op, size_t bytes) {
    const auto parts = splits(op) ? static_cast<size_t>(size_) : 1;
    count_ = std::max<size_t>(bytes / sizeof(float) / parts, 1);
    in_.resize(count_ * parts);
    out_.assign(count_ * parts, -1);
    for (size_t i = 0; i < in_.size(); ++i) in_[i] = item(rank_, i % count_);
  }

  Request begin(const std::string& op) {
    float* const in = in_.data();
    float* const out = out_.data();
    if (op == "allreduce") return comm_.allreduce(out, count_, kFloat, Reduction::kMax);
    if (op == "broadcast") return comm_.broadcast(rank_ == 0 ? in : out, count_, kFloat, 0);
    if (op == "allgather") return comm_.allgather(in, out, count_, kFloat);
    if (op == "reduce_scatter")
      return comm_.reduceScatter(in, out, count_, kFloat, Reduction::kSum);
    if (op == "reduce") return comm_.reduce(in, out, count_, kFloat, Reduction::kSum, 0);
    if (op == "gather") return comm_.gather(in, out, count_, kFloat, 0);
    if (op == "scatter") return comm_.scatter(in, out, count_, kFloat, 0);
    if (op == "alltoall") return comm_.alltoall(in, out, count_, kFloat);
    if (op == "barrier") return comm_.barrier();
    if (op == "sendrecv") {
      comm_.send(in, count_, kFloat, (rank_ + 1) % size_);
      return comm_.recv(out, count_, kFloat, (rank_ + size_ - 1) % size_);
    }
    throw std::invalid_argument("--op: " + op + " is none of them");
  }

  void once(const std::string& op) {
    if (op == "allreduce") std::copy(in_.begin(), in_.end(), out_.begin());
    begin(op).wait();
  }

  // As many as fit in the time, the same on all ranks.
  size_t agreeOnRounds(const std::string& op) {
    const auto began = Clock::now();
    for (int i = 0; i < 3; ++i) once(op);
    const double each = microseconds(Clock::now() - began) / 3;
    auto rounds =
        static_cast<int64_t>(std::clamp(seconds_ * 1e6 / std::max(each, 1.0), 5.0, 5000.0));
    comm_.broadcast(&rounds, 1, DataType::kInt64, 0).wait();
    return static_cast<size_t>(rounds);
  }

  // What item i of the result has to be; negative: there is none here.
  float expected(const std::string& op, size_t i) const {
    const size_t within = i % count_;
    const auto part = static_cast<int>(i / count_);
    const float ranks = static_cast<float>(size_ * (size_ - 1)) / 2;
    const float sum = ranks + static_cast<float>(size_) * static_cast<float>(within % 7);
    if (op == "allreduce") return item(size_ - 1, within);
    if (op == "broadcast") return rank_ == 0 ? -1 : item(0, within);
    if (op == "allgather" || op == "alltoall") return item(part, within);
    if (op == "gather") return rank_ == 0 ? item(part, within) : -1;
    if (op == "reduce_scatter") return part == 0 ? sum : -1;
    if (op == "reduce") return rank_ == 0 ? sum : -1;
    if (op == "scatter") return part == 0 ? item(0, within) : -1;
    if (op == "sendrecv") return item((rank_ + size_ - 1) % size_, within);
    return -1;
  }

  size_t countWrong(const std::string& op) const {
    size_t wrong = 0;
    for (size_t i = 0; i < out_.size(); ++i) {
      const float wanted = expected(op, i);
      if (wanted >= 0 && out_[i] != wanted) ++wrong;
    }
    return wrong;
  }

  // Bytes that the slowest connection has to carry, over the operation's: nccl-tests' definitions.
  double busFactor(const std::string& op) const {
    const double n = size_;
    if (op == "allreduce") return 2 * (n - 1) / n;
    if (splits(op)) return (n - 1) / n;
    return 1;
  }

  Line lineOf(const std::string& op, size_t bytes, double issue, std::vector<double> times) {
    auto wrong = static_cast<int64_t>(countWrong(op));
    comm_.allreduce(&wrong, 1, DataType::kInt64, Reduction::kSum).wait();
    Line line;
    line.op = op;
    line.bytes =
        bytes == 0 ? 0 : count_ * sizeof(float) * (splits(op) ? static_cast<size_t>(size_) : 1);
    line.count = bytes == 0 ? 0 : count_;
    line.issue_us = issue;
    line.time_us = median(times);
    line.times = std::move(times);
    line.wrong = static_cast<size_t>(wrong);
    line.algbw = static_cast<double>(line.bytes) / line.time_us / 1e3;
    line.busbw = line.algbw * busFactor(op);
    return line;
  }

  Comm& comm_;
  const std::shared_ptr<torchft_ext::Store> store_;
  const int rank_;
  const int size_;
  const double seconds_;
  size_t count_ = 0;
  std::vector<float> in_;
  std::vector<float> out_;
  int next_ = 0;
};

void print(const Line& line) {
  std::printf("%-15s %12zu %12zu %7s %10.2f %10.2f %9.3f %9.3f %7zu\n", line.op.c_str(), line.bytes,
              line.count, "float", line.issue_us, line.time_us, line.algbw, line.busbw, line.wrong);
  std::fflush(stdout);
}

// As benchmarks/bench_report.py's summary(), which benchmarks/compare.py reads.
std::string summaryOf(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  const auto at = [&times](double part) {
    return times[static_cast<size_t>(part * static_cast<double>(times.size() - 1))] / 1e6;
  };
  std::ostringstream json;
  json << "{\"count\": " << times.size() << ", \"median\": " << at(0.5) << ", \"p99\": " << at(0.99)
       << ", \"min\": " << at(0) << ", \"max\": " << at(1) << "}";
  return json.str();
}

std::string jsonOf(const std::vector<Line>& lines, int world) {
  std::ostringstream json;
  json << "{\"benchmark\": \"ft_bench\", \"world\": " << world << ", \"results\": [";
  for (size_t i = 0; i < lines.size(); ++i) {
    const Line& line = lines[i];
    json << (i == 0 ? "" : ", ") << "{\"op\": \"" << line.op << "\", \"bytes\": " << line.bytes
         << ", \"seconds\": " << summaryOf(line.times) << ", \"issue_us\": " << line.issue_us
         << ", \"time_us\": " << line.time_us << ", \"algbw_gbs\": " << line.algbw
         << ", \"busbw_gbs\": " << line.busbw << ", \"wrong\": " << line.wrong << "}";
  }
  json << "]}";
  return json.str();
}

std::vector<std::string> chosen(const std::string& op) {
  if (op != "all") return {op};
  return {"allreduce", "broadcast", "allgather", "reduce_scatter", "reduce",    "gather",
          "scatter",   "alltoall",  "sendrecv",  "barrier",        "configure", "abort"};
}

int runRank(const Arguments& arguments) {
  const int rank = std::stoi(arguments.at("rank"));
  const int world = std::stoi(arguments.at("world"));
  const auto store = torchft_ext::makeFileStore(arguments.at("directory"));
  CommOptions options;
  options.name = "bench";
  options.timeout = std::chrono::minutes(2);
  options.local_sockets = arguments.at("tcp").empty();
  Comm comm(options);
  comm.configure(store, "bench", rank, world);
  Bench bench(comm, store, std::stod(arguments.at("seconds")));
  if (rank == 0) {
    std::printf("%-15s %12s %12s %7s %10s %10s %9s %9s %7s\n", "operation", "bytes", "count",
                "type", "issue us", "time us", "algbw", "busbw", "wrong");
  }
  std::vector<Line> lines;
  const auto note = [&](Line line) {
    if (rank == 0) print(line);
    lines.push_back(std::move(line));
  };
  const size_t most = parseBytes(arguments.at("max"));
  const size_t factor = parseBytes(arguments.at("factor"));
  for (const std::string& op : chosen(arguments.at("op"))) {
    if (op == "configure") {
      note(bench.configure());
    } else if (op == "abort") {
      note(bench.abort());
    } else if (op == "barrier") {
      note(bench.collective(op, 0));
    } else {
      for (size_t bytes = parseBytes(arguments.at("min")); bytes <= most; bytes *= factor) {
        note(bench.collective(op, bytes));
      }
    }
  }
  comm.shutdown();
  if (rank == 0) std::printf("%s\n", jsonOf(lines, world).c_str());
  const bool right =
      std::all_of(lines.begin(), lines.end(), [](const Line& line) { return line.wrong == 0; });
  return right ? 0 : 1;
}

pid_t start(Arguments arguments, int rank) {
  arguments["rank"] = std::to_string(rank);
  std::vector<std::string> words{"ft_bench"};
  for (const auto& [name, value] : arguments) words.insert(words.end(), {"--" + name, value});
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::execv("/proc/self/exe", argv.data());
  std::_Exit(127);
}

int launch(Arguments arguments) {
  const auto directory =
      std::filesystem::temp_directory_path() / ("ft_bench_" + std::to_string(::getpid()));
  arguments["directory"] = directory.string();
  const int world = std::stoi(arguments.at("world"));
  std::vector<pid_t> pids;
  for (int rank = 0; rank < world; ++rank) pids.push_back(start(arguments, rank));
  bool good = true;
  for (const pid_t pid : pids) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    good = good && status == 0;
  }
  std::filesystem::remove_all(directory);
  return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments{{"world", "4"},  {"op", "allreduce"}, {"min", "4"}, {"max", "64M"},
                      {"factor", "4"}, {"seconds", "0.3"},  {"tcp", ""}};
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--tcp" && (i + 1 == argc || std::string(argv[i + 1]).rfind("--", 0) == 0)) {
      arguments["tcp"] = "1";
    } else if (word != "--help" && word.rfind("--", 0) == 0 && i + 1 < argc) {
      arguments[word.substr(2)] = argv[++i];
    } else {
      (word == "--help" ? std::cout : std::cerr) << kHelp;
      return word == "--help" ? 0 : 2;
    }
  }
  try {
    return arguments.count("rank") != 0 ? runRank(arguments) : launch(arguments);
  } catch (const std::exception& error) {
    std::cerr << "ft_bench: " << error.what() << "\n";
    return 1;
  }
}
