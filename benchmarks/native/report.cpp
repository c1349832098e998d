#include "report.h"

#include <algorithm>
#include <cstdio>
#include <sstream>

namespace torchft_ext::bench {
namespace {

double algorithmBandwidth(const Row& row) {  // GB/s
  const double time = median(row.times);
  return time == 0 ? 0 : static_cast<double>(row.bytes) / time / 1e3;
}

// As benchmarks/bench_report.py's summary(), in seconds.
std::string summaryOf(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  const auto at = [&times](double part) {
    return times[static_cast<size_t>(part * static_cast<double>(times.size() - 1))] / 1e6;
  };
  std::ostringstream json;
  json << "{\"count\": " << times.size() << ", \"median\": " << median(times) / 1e6
       << ", \"p99\": " << std::max(at(0.99), median(times) / 1e6) << ", \"min\": " << at(0)
       << ", \"max\": " << at(1) << "}";
  return json.str();
}

std::string jsonOf(const Row& row, int world) {
  const double bandwidth = algorithmBandwidth(row);
  std::ostringstream json;
  json << "{\"op\": \"" << row.op << "\", \"world\": " << world << ", \"bytes\": " << row.bytes
       << ", \"seconds\": " << summaryOf(row.times) << ", \"issue_us\": " << row.issue_us
       << ", \"algbw_gbs\": " << bandwidth << ", \"busbw_gbs\": " << bandwidth * row.bus_factor
       << ", \"wrong\": " << static_cast<double>(row.wrong);
  for (const auto& [name, value] : row.more) json << ", \"" << name << "\": " << value;
  json << "}";
  return json.str();
}

}  // namespace

double microseconds(BenchClock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

bool hasParts(const std::string& op) {
  return op == "allgather" || op == "reduce_scatter" || op == "gather" || op == "scatter" ||
         op == "alltoall";
}

double busFactor(const std::string& op, int world) {
  const double n = world;
  if (op == "allreduce") return 2 * (n - 1) / n;
  return hasParts(op) ? (n - 1) / n : 1;
}

void printHead() {
  std::printf("%-15s %12s %12s %7s %10s %10s %9s %9s %7s\n", "operation", "bytes", "count", "type",
              "issue us", "time us", "algbw", "busbw", "wrong");
}

void print(const Row& row) {
  const double bandwidth = algorithmBandwidth(row);
  std::printf("%-15s %12zu %12zu %7s %10.2f %10.2f %9.3f %9.3f %7zu\n", row.op.c_str(), row.bytes,
              row.count, row.count == 0 ? "-" : "float", row.issue_us, median(row.times), bandwidth,
              bandwidth * row.bus_factor, row.wrong);
  for (const auto& [name, value] : row.more) std::printf("  %s: %.2f\n", name.c_str(), value);
  std::fflush(stdout);
}

void printJson(const std::string& benchmark, int world, const std::vector<Row>& rows) {
  std::string results;
  for (const Row& row : rows) results += (results.empty() ? "" : ", ") + jsonOf(row, world);
  std::printf("{\"benchmark\": \"%s\", \"world\": %d, \"results\": [%s]}\n", benchmark.c_str(),
              world, results.c_str());
}

bool allRight(const std::vector<Row>& rows) {
  return std::all_of(rows.begin(), rows.end(), [](const Row& row) { return row.wrong == 0; });
}

}  // namespace torchft_ext::bench
