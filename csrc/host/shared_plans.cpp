#include "host/shared_plans.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <stdexcept>

#include "host/shared_board.h"

namespace torchft_ext {
namespace {

using Row = SharedPlanRow;
using Cores = SharedPlanRow::Cores;
using Words = std::vector<std::string_view>;

constexpr size_t kKibi = 1024;
constexpr size_t kMebi = kKibi * kKibi;
constexpr size_t kLeastChunk = 8 * kKibi;  // has a cache line for each of 64 ranks, and their sizes
constexpr size_t kCacheLine = 64;
constexpr size_t kMostRows = 256;
constexpr size_t kMostText = 64 * kKibi;

constexpr std::string_view kBuiltIn = R"(
allreduce       any    any     80     line
allreduce       any    any     32K    once
allreduce       any    any     any    slices
broadcast       any    any     80     line
broadcast       any    any     any    chunks
allgather       any    any     80     line
allgather       any    any     any    chunks
reduce_scatter  any    any     80     line
reduce_scatter  any    any     any    chunks
reduce          any    any     80     line
reduce          any    any     any    chunks
gather          any    any     80     line
gather          any    any     any    chunks
scatter         any    any     80     line
scatter         any    any     any    chunks
alltoall        any    any     any    chunks
)";

std::string quoted(std::string_view text) {
  return "'" + std::string(text.substr(0, 40)) + "'";
}

std::string expectedFound(const char* expected, std::string_view found) {
  return std::string("expected ") + expected + ", found " + quoted(found);
}

Words wordsOf(std::string_view line) {
  constexpr std::string_view kBlank = " \t\r";
  line = line.substr(0, line.find('#'));
  Words words;
  while (true) {
    const size_t begin = line.find_first_not_of(kBlank);
    if (begin == std::string_view::npos) return words;
    line.remove_prefix(begin);
    const size_t end = std::min(line.find_first_of(kBlank), line.size());
    words.push_back(line.substr(0, end));
    line.remove_prefix(end);
  }
}

std::optional<size_t> numberOf(std::string_view text) {
  size_t number = 0;
  const char* const begin = text.data();
  const char* const end = begin + text.size();
  const auto [stopped, error] = std::from_chars(begin, end, number);
  if (error != std::errc() || stopped != end) return std::nullopt;
  return number;
}

// "80", "32K", "1M".
std::optional<size_t> bytesOf(std::string_view text) {
  size_t unit = 1;
  if (text.ends_with('K')) unit = kKibi;
  if (text.ends_with('M')) unit = kMebi;
  if (unit > 1) text.remove_suffix(1);
  const auto number = numberOf(text);
  if (!number || *number > kAnySize / 2 / unit) return std::nullopt;
  return *number * unit;
}

std::string textOfBytes(size_t bytes) {
  if (bytes == kAnySize) return "any";
  if (bytes >= kMebi && bytes % kMebi == 0) return std::to_string(bytes / kMebi) + "M";
  if (bytes >= kKibi && bytes % kKibi == 0) return std::to_string(bytes / kKibi) + "K";
  return std::to_string(bytes);
}

std::optional<OpKind> kindOf(std::string_view text) {
  for (const OpKind kind : SharedPlanTable::kPlannedKinds) {
    if (text == toString(kind)) return kind;
  }
  return std::nullopt;
}

std::optional<SharedPlan> planOf(std::string_view text) {
  for (size_t plan = 0; plan < kSharedPlans; ++plan) {
    const auto one = static_cast<SharedPlan>(plan);
    if (text == toString(one)) return one;
  }
  return std::nullopt;
}

const char* textOfCores(Cores cores) {
  if (cores == Cores::kFew) return "few";
  return cores == Cores::kEnough ? "enough" : "any";
}

std::optional<Cores> coresOf(std::string_view text) {
  for (const Cores cores : {Cores::kAny, Cores::kFew, Cores::kEnough}) {
    if (text == textOfCores(cores)) return cores;
  }
  return std::nullopt;
}

// "any", "4", "2-8".
bool readRanks(std::string_view text, Row& row) {
  if (text == "any") return true;
  const size_t dash = text.find('-');
  const auto from = numberOf(text.substr(0, dash));
  const auto to = dash == std::string_view::npos ? from : numberOf(text.substr(dash + 1));
  if (!from || !to || *from < 2 || *to < *from || *to > kMostSharing) return false;
  row.from_ranks = static_cast<int>(*from);
  row.to_ranks = static_cast<int>(*to);
  return true;
}

std::string textOfRanks(const Row& row) {
  if (row.from_ranks == 2 && row.to_ranks == kMostSharing) return "any";
  const std::string from = std::to_string(row.from_ranks);
  return row.from_ranks == row.to_ranks ? from : from + "-" + std::to_string(row.to_ranks);
}

// Empty: it does.
std::string whyItDoesNotServe(const Row& row) {
  const bool reduces_for_all = row.plan == SharedPlan::kOnce || row.plan == SharedPlan::kSlices;
  const bool is_allreduce = row.kind == OpKind::kAllreduce;
  const bool serves = row.plan == SharedPlan::kLine ? row.kind != OpKind::kAlltoall
                                                    : reduces_for_all == is_allreduce;
  const std::string plan = toString(row.plan);
  if (!serves) return "the plan " + plan + " cannot run " + toString(row.kind);
  if (row.kind == OpKind::kAlltoall && row.up_to != kAnySize)
    return "alltoall: expected 'any' size, as no rank knows the sizes of all, found " +
           quoted(textOfBytes(row.up_to));
  const size_t slot = sharedSlotBytes(row.to_ranks);
  if (row.plan == SharedPlan::kLine && row.up_to > kSharedPayloadBytes)
    return "the plan line: expected at most " + std::to_string(kSharedPayloadBytes) +
           " bytes, found " + quoted(textOfBytes(row.up_to));
  if (row.plan == SharedPlan::kOnce && row.up_to > slot)
    return "the plan once: expected at most a slot of " + std::to_string(row.to_ranks) +
           " ranks, " + textOfBytes(slot) + ", found " + quoted(textOfBytes(row.up_to));
  if (row.chunk_bytes == 0) return {};
  if (row.plan == SharedPlan::kLine || row.plan == SharedPlan::kOnce)
    return "the plan " + plan + " has no chunks";
  if (row.chunk_bytes < kLeastChunk || row.chunk_bytes > slot || row.chunk_bytes % kCacheLine != 0)
    return "the chunk: expected " + textOfBytes(kLeastChunk) + " to a slot of " +
           std::to_string(row.to_ranks) + " ranks, " + textOfBytes(slot) +
           ", in whole cache lines of 64 bytes, found " + quoted(textOfBytes(row.chunk_bytes));
  return {};
}

// A string: why it is none.
std::variant<Row, std::string> rowOf(const Words& words) {
  constexpr size_t kLeastWords = 5;
  if (words.size() < kLeastWords || words.size() > kLeastWords + 1)
    return "expected operation, ranks, cores, size, plan and perhaps chunk, found " +
           std::to_string(words.size()) + (words.size() == 1 ? " word" : " words");
  Row row;
  const auto kind = kindOf(words[0]);
  if (!kind) return expectedFound("a collective with plans, such as 'allreduce'", words[0]);
  row.kind = *kind;
  if (!readRanks(words[1], row))
    return expectedFound("ranks: 'any', '4' or '2-8', from 2 to 64", words[1]);
  const auto cores = coresOf(words[2]);
  if (!cores) return expectedFound("cores: 'any', 'few' or 'enough'", words[2]);
  row.cores = *cores;
  const auto up_to = words[3] == "any" ? std::optional(kAnySize) : bytesOf(words[3]);
  if (!up_to) return expectedFound("a size: 'any', '80', '32K' or '1M'", words[3]);
  row.up_to = *up_to;
  const auto plan = planOf(words[4]);
  if (!plan) return expectedFound("a plan: 'line', 'once', 'slices' or 'chunks'", words[4]);
  row.plan = *plan;
  if (words.size() > kLeastWords && words[5] != "slot") {
    const auto chunk = bytesOf(words[5]);
    if (!chunk || *chunk == 0) return expectedFound("a chunk: 'slot' or '64K'", words[5]);
    row.chunk_bytes = *chunk;
  }
  if (std::string why = whyItDoesNotServe(row); !why.empty()) return why;
  return row;
}

bool fits(const Row& row, int size, bool few_cores) {
  if (size < row.from_ranks || size > row.to_ranks) return false;
  return row.cores == Cores::kAny || (row.cores == Cores::kFew) == few_cores;
}

// Empty: each operation has a plan for each size.
std::string whatLacks(const std::vector<Row>& rows) {
  for (const OpKind kind : SharedPlanTable::kPlannedKinds) {
    for (int size = 2; size <= kMostSharing; ++size) {
      for (const bool few : {true, false}) {
        const bool ends = std::any_of(rows.begin(), rows.end(), [&](const Row& row) {
          return row.kind == kind && row.up_to == kAnySize && fits(row, size, few);
        });
        if (!ends)
          return std::string(toString(kind)) + ": expected a row of 'any' size for " +
                 std::to_string(size) + " ranks with " + (few ? "few" : "enough") +
                 " cores, found none";
      }
    }
  }
  return {};
}

std::string textOf(const Row& row) {
  const std::array<std::string, 5> words = {toString(row.kind), textOfRanks(row),
                                            textOfCores(row.cores), textOfBytes(row.up_to),
                                            toString(row.plan)};
  constexpr std::array<size_t, 5> kWidths = {16, 7, 8, 7, 0};
  std::string text;
  for (size_t at = 0; at < words.size(); ++at) {
    text += words[at];
    if (words[at].size() < kWidths[at]) text.append(kWidths[at] - words[at].size(), ' ');
  }
  if (row.chunk_bytes > 0) text += "  " + textOfBytes(row.chunk_bytes);
  return text;
}

// FNV-1a.
uint32_t hashed(std::string_view text, uint32_t hash = 2166136261U) {
  for (const char letter : text) hash = (hash ^ static_cast<uint8_t>(letter)) * 16777619U;
  return hash;
}

// A string: which line is none, and why.
std::variant<std::vector<Row>, std::string> rowsOf(std::string_view text) {
  std::vector<Row> rows;
  if (text.size() > kMostText)
    return "expected at most 64 KiB, found " + std::to_string(text.size());
  for (size_t number = 1; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    const Words words = wordsOf(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    if (words.empty()) continue;
    auto row = rowOf(words);
    const std::string line = "line " + std::to_string(number) + ": ";
    if (const auto* why = std::get_if<std::string>(&row)) return line + *why;
    rows.push_back(std::get<Row>(row));
    if (rows.size() > kMostRows) return line + "expected at most 256 rows";
  }
  return rows;
}

}  // namespace

const char* toString(SharedPlan plan) {
  switch (plan) {
    case SharedPlan::kLine:
      return "line";
    case SharedPlan::kOnce:
      return "once";
    case SharedPlan::kSlices:
      return "slices";
    case SharedPlan::kChunks:
      return "chunks";
  }
  return "?";
}

size_t sharedSlotBytes(int size) {
  if (size <= 4) return 256 * kKibi;
  if (size <= 8) return 128 * kKibi;
  return std::max<size_t>(32, 1024 / static_cast<size_t>(size)) * kKibi;
}

// ---------------------------------------------------------------- of a generation

SharedPlans::SharedPlans(const std::vector<SharedPlanRow>& rows) {
  for (const Row& row : rows) rows_[static_cast<size_t>(row.kind)].push_back(row);
  // its exchanges are those of an allgather
  rows_[static_cast<size_t>(OpKind::kSparseAllreduce)] =
      rows_[static_cast<size_t>(OpKind::kAllgather)];
}

const SharedPlanRow& SharedPlans::of(OpKind kind, size_t bytes) const {
  for (const Row& row : rows_[static_cast<size_t>(kind)]) {
    if (bytes <= row.up_to) return row;
  }
  throw std::logic_error(std::string("no plan in shared memory for ") + toString(kind));
}

// ---------------------------------------------------------------- the table

SharedPlanTable::SharedPlanTable() : rows_(std::get<std::vector<Row>>(rowsOf(kBuiltIn))) {}

std::variant<SharedPlanTable, std::string> SharedPlanTable::parse(std::string_view text) {
  auto read = rowsOf(text);
  if (auto* why = std::get_if<std::string>(&read)) return std::move(*why);
  const auto& given = std::get<std::vector<Row>>(read);
  SharedPlanTable table;
  std::vector<Row> rows;
  for (const OpKind kind : kPlannedKinds) {
    const auto is_of_kind = [kind](const Row& row) { return row.kind == kind; };
    const bool replaced = std::any_of(given.begin(), given.end(), is_of_kind);
    const std::vector<Row>& from = replaced ? given : table.rows_;
    std::copy_if(from.begin(), from.end(), std::back_inserter(rows), is_of_kind);
  }
  if (std::string lacks = whatLacks(rows); !lacks.empty()) return lacks;
  table.rows_ = std::move(rows);
  return table;
}

std::string SharedPlanTable::text() const {
  std::string text = "# operation     ranks  cores   up to  plan    chunk\n";
  for (const Row& row : rows_) text += textOf(row) + "\n";
  return text;
}

SharedPlanTable::Digests SharedPlanTable::digests() const {
  Digests digests{};
  for (size_t at = 0; at < digests.size(); ++at) {
    uint32_t hash = hashed({});
    for (const Row& row : rows_) {
      if (row.kind == kPlannedKinds[at]) hash = hashed(textOf(row) + "\n", hash);
    }
    digests[at] = hash;
  }
  return digests;
}

uint32_t SharedPlanTable::digest() const {
  return digestOf(digests());
}

SharedPlans SharedPlanTable::plansFor(int size, bool few_cores) const {
  std::vector<Row> rows;
  std::copy_if(rows_.begin(), rows_.end(), std::back_inserter(rows),
               [&](const Row& row) { return fits(row, size, few_cores); });
  return SharedPlans(rows);
}

std::string nameDifferences(const SharedPlanTable::Digests& one,
                            const SharedPlanTable::Digests& other) {
  std::string names;
  for (size_t at = 0; at < one.size(); ++at) {
    if (one[at] == other[at]) continue;
    names += (names.empty() ? "" : ", ");
    names += toString(SharedPlanTable::kPlannedKinds[at]);
  }
  return names;
}

uint32_t digestOf(const SharedPlanTable::Digests& digests) {
  uint32_t hash = hashed({});
  for (const uint32_t digest : digests) hash = hashed(std::to_string(digest) + "\n", hash);
  return hash;
}

}  // namespace torchft_ext
