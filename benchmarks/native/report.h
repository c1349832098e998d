// What the native benchmarks print: a table as nccl-tests', and one line of JSON, as
// benchmarks/compare.py reads it.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace torchft_ext::bench {

using BenchClock = std::chrono::steady_clock;  // the same for all processes of a host

double microseconds(BenchClock::duration duration);
double median(std::vector<double> values);  // 0: there are none

// One row. Values; bandwidths follow from bytes and times.
struct Row {
  std::string op;
  size_t bytes = 0;
  size_t count = 0;           // items
  double issue_us = 0;        // of the call alone, the median
  std::vector<double> times;  // of each round, in microseconds
  double bus_factor = 1;      // nccl-tests': bytes of the busiest connection over the operation's
  size_t wrong = 0;           // results
  std::vector<std::pair<std::string, double>> more;  // by name, in JSON and below the row
};

// Bytes that the busiest connection has to carry, over the operation's: nccl-tests' definitions.
double busFactor(const std::string& op, int world);
// Are its bytes those of all ranks' parts together?
bool hasParts(const std::string& op);

void printHead();
void print(const Row& row);
void printJson(const std::string& benchmark, int world, const std::vector<Row>& rows);
bool allRight(const std::vector<Row>& rows);

}  // namespace torchft_ext::bench
