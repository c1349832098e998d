// The CPU engine, timed in processes without Python and torch, as nccl-tests shows it: for each
// operation and size the time, the algorithm's and the bus's bandwidth, and how many results are
// wrong.
//
// It starts its ranks itself. Times are medians: of operations the slowest rank's, round by round;
// of the rest rank 0's. The last line is JSON.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <stdexcept>

#include "agreement.h"
#include "base/log.h"
#include "collectives.h"
#include "generations.h"
#include "processes.h"
#include "startup.h"

namespace torchft_ext::bench {
namespace {

constexpr const char* kHelp =
    R"(usage: ft_bench [--world 4] [--op allreduce] [--min 4] [--max 64M] [--factor 4] [--seconds 0.3]
                [--rounds 20] [--tcp]

  --op       one, several with commas between them, or all:
             allreduce, broadcast, allgather, reduce_scatter, reduce, gather, scatter, alltoall,
             sendrecv, barrier
             issue       allreduces of one item, 64 of them issued before the first is waited for
             wait_done   wait() on an operation that is done
             agree       members of an elastic job agree on a step; also told in barriers
             configure   a new generation of the same members
             abort       until all waiters are released
             death       from a member's SIGKILL until each survivor, and the last one, is released
             startup     a process that forms a world of one: from its start to its first sum
  --min,max  bytes: of the whole result for allgather, of the whole input for reduce_scatter, gather,
             scatter and alltoall; suffixes K, M, G
  --seconds  for each size
  --rounds   of what has no size; of agree, issue and wait_done tens of times as many
  --tcp      TCP alone, no local sockets
)";

std::vector<std::string> allOps() {
  std::vector<std::string> all = collectiveOps();
  all.insert(all.end(), {"issue", "wait_done", "agree", "configure", "abort", "death", "startup"});
  return all;
}

std::vector<Row> measure(const std::string& op, const Member& member, Collectives& collectives) {
  if (op == "barrier") return {collectives.measure(op, 0)};
  if (op == "issue") return {collectives.issueWithoutWait()};
  if (op == "wait_done") return {collectives.waitForDone()};
  if (op == "agree") return {measureAgree(member)};
  if (op == "configure") return {measureConfigure(member)};
  if (op == "abort") return {measureAbort(member)};
  if (op == "death") return measureDeath(member);
  if (op == "startup") return {measureStartup(member)};
  throw std::invalid_argument("--op: " + op + " is none of them");
}

// Every row of these operations, printed as it comes.
std::vector<Row> measureAll(const Member& member) {
  Collectives collectives(member);
  std::vector<Row> rows;
  const auto note = [&](Row row) {
    if (member.rank == 0) print(row);
    rows.push_back(std::move(row));
  };
  const std::vector<std::string>& sized = collectiveOps();
  for (const std::string& op : chosenOps(member.arguments.op, allOps())) {
    if (op != "barrier" && std::find(sized.begin(), sized.end(), op) != sized.end()) {
      for (const size_t bytes : sizesOf(member.arguments)) note(collectives.measure(op, bytes));
    } else {
      for (Row& row : measure(op, member, collectives)) note(std::move(row));
    }
  }
  return rows;
}

CommOptions optionsOf(const Arguments& arguments) {
  CommOptions options;
  options.name = "bench";
  options.timeout = std::chrono::minutes(2);
  options.local_sockets = !arguments.tcp;
  return options;
}

// Warnings tell of the deaths and aborts that the benchmark causes itself.
void logErrorsAlone() {
  setLogSink([](LogLevel level, const std::string& line) {
    if (level == LogLevel::kError) std::cerr << "ft_bench: " << line << "\n";
  });
}

int runRank(const Arguments& arguments) {
  logErrorsAlone();
  const auto store = makeFileStore(arguments.directory);
  Comm comm(optionsOf(arguments));
  comm.configure(store, "bench", arguments.rank, arguments.world);
  if (arguments.rank == 0) printHead();
  const Member member{arguments, comm, store, arguments.rank, arguments.world};
  const std::vector<Row> rows = measureAll(member);
  comm.shutdown();
  if (arguments.rank == 0) printJson("ft_bench", arguments.world, rows);
  return allRight(rows) ? 0 : 1;
}

int runVictim(const Arguments& arguments) {
  Comm comm(optionsOf(arguments));
  beVictim(arguments, comm, makeFileStore(arguments.directory));
  return 0;
}

int launch(Arguments arguments) {
  chosenOps(arguments.op, allOps());  // a wrong one is told once
  const auto directory =
      std::filesystem::temp_directory_path() / ("ft_bench_" + std::to_string(::getpid()));
  arguments.directory = directory.string();
  arguments.role = "rank";
  std::vector<Process> ranks;
  for (arguments.rank = 0; arguments.rank < arguments.world; ++arguments.rank) {
    ranks.emplace_back(arguments);
  }
  bool good = true;
  for (Process& rank : ranks) good = rank.wait() && good;
  std::filesystem::remove_all(directory);
  return good ? 0 : 1;
}

int run(const std::vector<std::string>& words) {
  const Arguments arguments = parseArguments(words);
  if (arguments.role == "rank") return runRank(arguments);
  if (arguments.role == "victim") return runVictim(arguments);
  if (arguments.role != "alone") return launch(arguments);
  beAlone();
  return 0;
}

}  // namespace
}  // namespace torchft_ext::bench

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words == std::vector<std::string>{"--help"}) {
    std::cout << torchft_ext::bench::kHelp;
    return 0;
  }
  try {
    return torchft_ext::bench::run(words);
  } catch (const std::invalid_argument& error) {
    std::cerr << "ft_bench: " << error.what() << "\n" << torchft_ext::bench::kHelp;
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "ft_bench: " << error.what() << "\n";
    return 1;
  }
}
