#include "elastic/job_report.h"

#include <algorithm>
#include <array>
#include <bit>

#include "elastic/elastic_codec.h"
#include "elastic/quorum.h"

namespace torchft_ext {
namespace {

constexpr size_t kLongestWords = 512;  // a name with its cause
constexpr size_t kMostNames = 64;      // of one change; clauses of waits
constexpr size_t kMostPhases = 16;

void writeDuration(ByteWriter& writer, Duration duration) {
  writer.u64(static_cast<uint64_t>(
      std::max<int64_t>(std::chrono::duration_cast<milliseconds>(duration).count(), 0)));
}

Duration readDuration(ByteReader& reader) {
  constexpr uint64_t kMost = uint64_t{100} * 366 * 24 * 3600 * 1000;  // a century, in ms
  const uint64_t count = reader.u64();
  if (count > kMost) reader.fail();
  return milliseconds(static_cast<int64_t>(std::min(count, kMost)));
}

uint32_t readCount(ByteReader& reader, size_t most) {
  const uint32_t count = reader.u32();
  if (count > most) reader.fail();
  return reader.ok() ? count : 0;
}

void writeNames(ByteWriter& writer, const std::vector<std::string>& names) {
  const size_t count = std::min(names.size(), kMostNames);
  writer.u32(static_cast<uint32_t>(count));
  for (size_t i = 0; i < count; ++i) writer.text(names[i].substr(0, kLongestWords));
}

std::vector<std::string> readNames(ByteReader& reader) {
  std::vector<std::string> names;
  const uint32_t count = readCount(reader, kMostNames);
  for (uint32_t i = 0; i < count && reader.ok(); ++i) names.push_back(reader.text(kLongestWords));
  return names;
}

void writeMember(ByteWriter& writer, const ReportedMember& one) {
  write(writer, one.member);
  writeDuration(writer, one.present);
  writer.u8(static_cast<uint8_t>((one.is_voter ? 1 : 0) | (one.may_be_lost ? 2 : 0)));
  writer.text(one.trouble.substr(0, kLongestWords));
}

ReportedMember readReportedMember(ByteReader& reader) {
  ReportedMember one;
  one.member = readMember(reader);
  one.present = readDuration(reader);
  const uint8_t flags = reader.u8();
  one.is_voter = (flags & 1) != 0;
  one.may_be_lost = (flags & 2) != 0;
  one.trouble = reader.text(kLongestWords);
  return one;
}

void writeMembers(ByteWriter& writer, const std::vector<ReportedMember>& members) {
  const size_t count = std::min(members.size(), kMostReported);
  writer.u32(static_cast<uint32_t>(count));
  for (size_t i = 0; i < count; ++i) writeMember(writer, members[i]);
}

std::vector<ReportedMember> readMembers(ByteReader& reader) {
  std::vector<ReportedMember> members;
  const uint32_t count = readCount(reader, kMostReported);
  for (uint32_t i = 0; i < count && reader.ok(); ++i) members.push_back(readReportedMember(reader));
  return members;
}

void writePhases(ByteWriter& writer, const std::vector<std::pair<std::string, Duration>>& phases) {
  const size_t count = std::min(phases.size(), kMostPhases);
  writer.u32(static_cast<uint32_t>(count));
  for (size_t i = 0; i < count; ++i) {
    writer.text(phases[i].first.substr(0, kLongestWords));
    writeDuration(writer, phases[i].second);
  }
}

std::vector<std::pair<std::string, Duration>> readPhases(ByteReader& reader) {
  std::vector<std::pair<std::string, Duration>> phases;
  const uint32_t count = readCount(reader, kMostPhases);
  for (uint32_t i = 0; i < count && reader.ok(); ++i) {
    std::string phase = reader.text(kLongestWords);
    phases.emplace_back(std::move(phase), readDuration(reader));
  }
  return phases;
}

void writeChanges(ByteWriter& writer, const std::vector<ReportedChange>& changes) {
  const size_t count = std::min(changes.size(), kMostChanges);
  writer.u32(static_cast<uint32_t>(count));
  for (size_t i = 0; i < count; ++i) {
    writer.u64(changes[i].view);
    writer.u32(changes[i].size);
    writeDuration(writer, changes[i].ago);
    writeNames(writer, changes[i].joined);
    writeNames(writer, changes[i].gone);
    writePhases(writer, changes[i].phases);
  }
}

std::vector<ReportedChange> readChanges(ByteReader& reader) {
  std::vector<ReportedChange> changes;
  const uint32_t count = readCount(reader, kMostChanges);
  for (uint32_t i = 0; i < count && reader.ok(); ++i) {
    ReportedChange change;
    change.view = reader.u64();
    change.size = reader.u32();
    change.ago = readDuration(reader);
    change.joined = readNames(reader);
    change.gone = readNames(reader);
    change.phases = readPhases(reader);
    changes.push_back(std::move(change));
  }
  return changes;
}

void writeSteps(ByteWriter& writer, const std::optional<ReportedSteps>& steps) {
  writer.u8(steps ? 1 : 0);
  if (!steps) return;
  writer.u64(steps->committed);
  writeDuration(writer, steps->ago);
  writer.u64(std::bit_cast<uint64_t>(steps->per_second));
}

std::optional<ReportedSteps> readSteps(ByteReader& reader) {
  if (reader.u8() == 0) return std::nullopt;
  ReportedSteps steps;
  steps.committed = reader.u64();
  steps.ago = readDuration(reader);
  steps.per_second = std::bit_cast<double>(reader.u64());
  return steps;
}

// So many of these may be lost, whichever they are, before those that are left have no quorum.
uint32_t losable(const std::vector<std::vector<MemberId>>& sets, const View& view,
                 std::set<MemberId> there) {
  const bool has_witness = !view.witness.isZero();
  uint32_t count = 0;
  for (const MemberId& voter : view.voters) {
    if (there.erase(voter) == 0) continue;
    if (quorumOf(sets, there, has_witness) == QuorumState::kNone) break;
    ++count;
  }
  return count;
}

}  // namespace

std::string encodeJobReport(const JobReport& report) {
  ByteWriter writer;
  writer.u8(static_cast<uint8_t>(report.by));
  write(writer, report.self);
  writer.raw(report.lineage.bytes);
  writer.u64(report.view);
  writer.u8(static_cast<uint8_t>((report.deciding ? 1 : 0) | (report.store_rule ? 2 : 0)));
  writer.u32(static_cast<uint32_t>(report.min_size));
  writer.u32(static_cast<uint32_t>(report.max_size));
  writer.raw(report.witness.bytes);
  writer.u32(report.size);
  writer.u32(report.may_lose);
  writeMembers(writer, report.members);
  writeMembers(writer, report.waiting);
  writeChanges(writer, report.changes);
  writeNames(writer, report.waits);
  writeSteps(writer, report.steps);
  return writer.take();
}

std::optional<JobReport> decodeJobReport(std::string_view bytes) {
  ByteReader reader(bytes);
  JobReport report;
  const uint8_t by = reader.u8();
  if (by > static_cast<uint8_t>(ReportedBy::kMember)) return std::nullopt;
  report.by = static_cast<ReportedBy>(by);
  report.self = readMember(reader);
  reader.raw(report.lineage.bytes);
  report.view = reader.u64();
  const uint8_t flags = reader.u8();
  report.deciding = (flags & 1) != 0;
  report.store_rule = (flags & 2) != 0;
  report.min_size = static_cast<int>(std::min<uint32_t>(reader.u32(), kMostMembers));
  report.max_size = static_cast<int>(std::min<uint32_t>(reader.u32(), kMostMembers));
  reader.raw(report.witness.bytes);
  report.size = reader.u32();
  report.may_lose = reader.u32();
  report.members = readMembers(reader);
  report.waiting = readMembers(reader);
  report.changes = readChanges(reader);
  report.waits = readNames(reader);
  report.steps = readSteps(reader);
  return reader.atEnd() ? std::optional(std::move(report)) : std::nullopt;
}

MeetingKey inquiryKey(const JobKey& key) {
  return {key.nonce.hex(), key.secret.hex()};
}

// All voters count alike, and so do all learners: one of each is judged.
void judgeLosses(JobReport& report, const View& view, const ElasticRules& rules,
                 const std::set<MemberId>& there, const std::set<MemberId>& needed) {
  const auto sets = acceptorSets(view, {});
  const auto spare = [&](std::set<MemberId> left, const MemberId& id) {
    left.erase(id);
    if (rules.storeDecidesAfter(view)) return left.size() >= static_cast<size_t>(rules.min_size);
    return quorumOf(sets, left, !view.witness.isZero()) != QuorumState::kNone;
  };
  std::array<std::optional<bool>, 2> by_role;  // learners, voters
  for (ReportedMember& one : report.members) {
    const MemberId& id = one.member.id;
    if (!there.contains(id)) continue;
    std::optional<bool>& known = by_role[one.is_voter ? 1 : 0];
    if (!known) known = spare(there, id);
    one.may_be_lost = *known && !needed.contains(id);
  }
  report.may_lose = losable(sets, view, there);
  if (!rules.storeDecidesAfter(view)) return;
  const auto least = static_cast<size_t>(rules.min_size);
  report.may_lose = static_cast<uint32_t>(there.size() - std::min(there.size(), least));
}

}  // namespace torchft_ext
