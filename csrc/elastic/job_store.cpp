#include "elastic/job_store.h"

#include <algorithm>
#include <charconv>
#include <ctime>
#include <utility>

#include "elastic/elastic_codec.h"

namespace torchft_ext {
namespace {

void write(ByteWriter& writer, const JobKey& key) {
  writer.raw(key.nonce.bytes);
  writer.raw(key.secret.bytes);
}

JobKey readKey(ByteReader& reader) {
  JobKey key;
  reader.raw(key.nonce.bytes);
  reader.raw(key.secret.bytes);
  return key;
}

Founding decodeFounding(const std::string& bytes) {
  ByteReader reader(bytes);
  Founding founding;
  founding.rules.store_rule = reader.u8() != 0;
  founding.rules.min_size = static_cast<int>(reader.u32());
  founding.rules.max_size = static_cast<int>(reader.u32());
  founding.key = readKey(reader);
  founding.view = readView(reader);
  if (!reader.atEnd()) throw StoreError("the job was founded by another version of this library");
  return founding;
}

std::vector<Member> decodeMembers(const std::string& bytes) {
  ByteReader reader(bytes);
  std::vector<Member> members;
  const uint32_t count = reader.u32();
  for (uint32_t i = 0; i < count && reader.ok(); ++i) members.push_back(readMember(reader));
  if (!reader.atEnd()) return {};
  return members;
}

std::string registerOf(const Lineage& lineage) {
  return "witness/" + lineage.hex();
}

std::optional<JobEnd> decodeEnd(const std::string& bytes) {
  constexpr uint64_t kYear3000 = 32'503'680'000;  // in seconds; later ones are no times of ours
  ByteReader reader(bytes);
  const uint64_t at = std::min(reader.u64(), kYear3000);
  const uint32_t members = std::min(reader.u32(), static_cast<uint32_t>(kMostMembers));
  if (!reader.atEnd()) return std::nullopt;
  return JobEnd{std::chrono::system_clock::time_point(std::chrono::seconds(at)), members};
}

std::string encodeRegister(const WitnessId& identity, const std::optional<AcceptedView>& held) {
  ByteWriter writer;
  writer.raw(identity.bytes);
  if (held) write(writer, *held);
  return writer.take();
}

}  // namespace

std::string keyOfEnd(const Founding& founding) {
  return "end/" + founding.view.lineage.hex();
}

std::string encodeEnd(const JobEnd& end) {
  using std::chrono::seconds;
  const auto since_epoch = std::chrono::floor<seconds>(end.at.time_since_epoch());
  ByteWriter writer;
  writer.u64(static_cast<uint64_t>(since_epoch.count()));
  writer.u32(end.members);
  return writer.take();
}

std::string JobEnd::describe() const {
  const std::time_t seconds = std::chrono::system_clock::to_time_t(at);
  std::tm utc{};
  ::gmtime_r(&seconds, &utc);
  char text[32];
  const size_t length = std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S UTC", &utc);
  return "ended at " + std::string(text, length) + " by " + std::to_string(members) +
         (members == 1 ? " member" : " members");
}

std::string encodeFounding(const Founding& founding) {
  ByteWriter writer;
  writer.u8(founding.rules.store_rule ? 1 : 0);
  writer.u32(static_cast<uint32_t>(founding.rules.min_size));
  writer.u32(static_cast<uint32_t>(founding.rules.max_size));
  write(writer, founding.key);
  write(writer, founding.view);
  return writer.take();
}

std::string encodeMembers(const std::vector<Member>& members) {
  ByteWriter writer;
  writer.u32(static_cast<uint32_t>(members.size()));
  for (const Member& member : members) write(writer, member);
  return writer.take();
}

ComparingStore& JobStore::store() {
  if (!store_) store_ = factory_();
  return *store_;
}

// What the call returns; after an error the next one gets a new connection.
template <typename Call>
std::invoke_result_t<Call> JobStore::guarded(const Call& call) {
  try {
    return call();
  } catch (const StoreError&) {
    store_.reset();
    throw;
  }
}

std::optional<std::string> JobStore::get(const std::string& key) {
  return guarded([&] {
    const auto values = store().getAll({prefix_ + key});
    return values ? std::optional(values->front()) : std::nullopt;
  });
}

// What stands there: this value, or one that was there before.
std::string JobStore::first(const std::string& key, const std::string& value) {
  return guarded([&] { return store().compareSet(prefix_ + key, "", value); });
}

std::optional<Founding> JobStore::founding() {
  const auto bytes = get("founding");
  return bytes ? std::optional(decodeFounding(*bytes)) : std::nullopt;
}

Founding JobStore::found(Founding proposed) {
  if (may_witness_) proposed.view.witness = identityTo(proposed.view.lineage);
  return decodeFounding(first("founding", encodeFounding(proposed)));
}

WitnessId JobStore::identityTo(const Lineage& lineage) {
  WitnessId identity;
  const std::string fresh = encodeRegister(WitnessId::random(), std::nullopt);
  const std::string stands = first(registerOf(lineage), fresh);
  ByteReader reader(stands);
  reader.raw(identity.bytes);
  return identity;
}

// Whoever finds the founding looks for the contacts: they come first.
WitnessId JobStore::restore(const Founding& founding, const Lineage& lineage,
                            const std::vector<Member>& members) {
  const std::string record = encodeFounding(founding);
  if (const auto stands = get("founding"); !stands || *stands != record) {
    if (stands) return {};
    first("contacts", encodeMembers(members));
    identityTo(lineage);
    if (first("founding", record) != record) return {};
  }
  return identityTo(lineage);
}

size_t JobStore::takeSeat(const Member& self) {
  return guarded([&] {
    const auto seat = static_cast<size_t>(store().add(prefix_ + "seats", 1)) - 1;
    if (seat >= kMostMembers) throw StoreError("too many processes have come to this job");
    store().set(prefix_ + "seat/" + std::to_string(seat), encodeMembers({self}));
    return seat;
  });
}

bool JobStore::hasSeat(size_t seat, const Member& self) {
  return get("seat/" + std::to_string(seat)) == encodeMembers({self});
}

// Its number stays taken, as that of one that died on its way.
void JobStore::giveUpSeat(size_t seat, const Member& self) {
  if (!hasSeat(seat, self)) return;
  guarded([&] { store().remove(prefix_ + "seat/" + std::to_string(seat)); });
}

size_t JobStore::seatsTaken() {
  const auto text = get("seats");
  size_t taken = 0;
  if (text) std::from_chars(text->data(), text->data() + text->size(), taken);
  return std::min(taken, kMostMembers);
}

std::vector<Member> JobStore::seats(size_t most) {
  const size_t taken = seatsTaken();
  std::vector<Member> members;
  for (size_t seat = 0; seat < taken && members.size() < most; ++seat) {
    const auto bytes = get("seat/" + std::to_string(seat));
    if (!bytes) continue;
    for (Member& member : decodeMembers(*bytes)) members.push_back(std::move(member));
  }
  return members;
}

std::vector<Member> JobStore::contacts() {
  const auto bytes = get("contacts");
  return bytes ? decodeMembers(*bytes) : std::vector<Member>();
}

void JobStore::setContacts(const std::vector<Member>& members) {
  guarded([&] { store().set(prefix_ + "contacts", encodeMembers(members)); });
}

std::optional<JobEnd> JobStore::end(const Founding& founding) {
  const auto bytes = get(keyOfEnd(founding));
  return bytes ? decodeEnd(*bytes) : std::nullopt;
}

bool JobStore::recordEnd(const Founding& founding, const View& last, const JobEnd& end) {
  const bool is_ours = !restore(founding, last.lineage, last.members).isZero();
  if (is_ours) first(keyOfEnd(founding), encodeEnd(end));
  return is_ours;
}

std::optional<JobStore::Register> JobStore::readRegister(const Lineage& lineage) {
  const auto bytes = get(registerOf(lineage));
  if (!bytes) return std::nullopt;
  Register found;
  found.bytes = *bytes;
  ByteReader reader(*bytes);
  reader.raw(found.identity.bytes);
  if (!reader.ok()) return std::nullopt;
  if (!reader.atEnd()) {
    found.held = readAccepted(reader);
    if (!reader.atEnd()) return std::nullopt;
  }
  return found;
}

std::optional<JobStore::RegisterState> JobStore::registerState(const Lineage& lineage) {
  const std::optional<Register> found = readRegister(lineage);
  if (!found) return std::nullopt;
  return RegisterState{found->identity, found->held ? found->held->view.number : 0};
}

// Only where nobody else has written since it was read: so a claim is a vote for this ballot, and a
// promise to none below it, in one step.
bool JobStore::writeRegister(const Register& found, const AcceptedView& held) {
  const std::string key = prefix_ + registerOf(held.view.lineage);
  const std::string wanted = encodeRegister(found.identity, held);
  return guarded([&] { return store().compareSet(key, found.bytes, wanted) == wanted; });
}

WitnessReply JobStore::ask(const WitnessRequest& request) {
  WitnessReply reply;
  reply.what = request.what;
  reply.lineage = request.lineage;
  reply.number = request.number;
  reply.ballot = request.ballot;
  const std::optional<Register> found = readRegister(request.lineage);
  if (!found) throw StoreError("it has restarted empty, or holds what is no view of the job");
  if (found->identity != request.identity) {
    throw StoreError("it has restarted empty since it became part of the view, or is another one");
  }
  if (found->held && found->held->view.number > request.number) {
    reply.later = found->held->view;
    return reply;
  }
  reply.has_vote = true;
  if (found->held && found->held->view.number == request.number) reply.held = found->held;
  if (request.what == WitnessRequest::What::kClaim) return claim(request, *found, reply);
  if (request.what == WitnessRequest::What::kDecide) return decide(request, *found, reply);
  return reply;
}

WitnessReply JobStore::claim(const WitnessRequest& request, const Register& found,
                             WitnessReply reply) {
  const AcceptedView mine{request.ballot, *request.view};
  if (reply.held == mine) {  // the answer to an earlier try was lost
    reply.claimed = true;
  } else if (reply.held == request.expected) {
    reply.claimed = writeRegister(found, mine);
    reply.has_vote = reply.claimed;  // somebody was faster: what stands there has to be read anew
  }
  return reply;
}

WitnessReply JobStore::decide(const WitnessRequest& request, const Register& found,
                              WitnessReply reply) {
  if (reply.held) {
    reply.decided = reply.held->view;
  } else if (writeRegister(found, {request.ballot, *request.view})) {
    reply.decided = request.view;
  } else {
    reply.has_vote = false;
  }
  return reply;
}

}  // namespace torchft_ext
