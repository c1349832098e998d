// Everything that parses bytes from the network or the store, under libFuzzer. TORCHFT_EXT_FUZZ
// names the parser (see kParsers). What a parser of whole values accepts must come out the same
// when it is encoded and parsed again; those that read streams are in streams.h.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "elastic/elastic_core.h"
#include "elastic/member_keys.h"
#include "elastic/view_store.h"
#include "host/issue_report.h"
#include "liveness/notice.h"
#include "membership/records.h"
#include "net/failure_frame.h"
#include "net/frame.h"
#include "net/handshake.h"
#include "net/socket_address.h"
#include "streams.h"

namespace {

using namespace torchft_ext;  // NOLINT(google-build-using-namespace): a program of its own

using fuzz::require;

std::string payloadOf(const std::string& frame) {
  return frame.substr(kFrameHeaderBytes);
}

void header(std::string_view bytes) {
  if (bytes.size() < kFrameHeaderBytes) return;
  FrameBytes raw;
  std::memcpy(raw.data(), bytes.data(), raw.size());
  versionOf(raw);
  std::string why;
  const auto parsed = decodeHeader(raw, &why);
  require(parsed.has_value() || !why.empty());
  if (parsed) require(encodeHeader(*parsed) == raw);
}

void failure(std::string_view bytes) {
  const auto parsed = decodeFailure(bytes, 8);
  if (parsed) require(encodeFailure(*parsed) == bytes);
}

void notice(std::string_view bytes) {
  const auto parsed = decodeNotice(bytes);
  if (parsed) require(encodeNotice(*parsed) == bytes);
}

void hello(std::string_view bytes) {
  const auto parsed = decodeHello(bytes);
  if (parsed) require(payloadOf(encodeHello(*parsed)) == bytes);
}

void welcome(std::string_view bytes) {
  const auto parsed = decodeWelcome(bytes);
  if (parsed) require(payloadOf(encodeWelcome(*parsed)) == bytes);
}

// What cannot be printed is replaced, so only the second time must give the same.
void refusal(std::string_view bytes) {
  const auto parsed = decodeRefusal(bytes);
  if (!parsed) return;
  const std::string again = payloadOf(encodeRefusal(*parsed));
  const auto parsed_again = decodeRefusal(again);
  require(parsed_again && parsed_again->code == parsed->code &&
          parsed_again->reason == parsed->reason);
}

// Addresses have several spellings, so only the second time must give the same.
void record(std::string_view bytes) {
  const auto parsed = decodeRecord(bytes);
  if (!parsed) return;
  const std::string again = encodeRecord(*parsed);
  const auto parsed_again = decodeRecord(again);
  require(parsed_again && encodeRecord(*parsed_again) == again);
}

void failure_record(std::string_view bytes) {
  const auto parsed = decodeFailureRecord(bytes);
  if (!parsed) return;
  const std::string again = encodeFailureRecord(*parsed);
  const auto parsed_again = decodeFailureRecord(again);
  require(parsed_again && encodeFailureRecord(*parsed_again) == again);
}

void go(std::string_view bytes) {
  const auto parsed = decodeGo(bytes);
  if (!parsed) return;
  const std::string again = encodeGo(parsed->token, parsed->roster);
  const auto parsed_again = decodeGo(again);
  require(parsed_again && encodeGo(parsed_again->token, parsed_again->roster) == again);
}

void address(std::string_view bytes) {
  const auto parsed = SocketAddress::parse(bytes);
  if (parsed) require(SocketAddress::parse(parsed->toString()) == parsed);
  PortRange::parse(bytes);
}

template <typename Id>
Id numbered(uint8_t number) {
  Id id;
  id.bytes.fill(number);
  return id;
}

// A member of a view of three, whose secret the sender does not know: whoever it is and whatever it
// says, this member goes on in its view, or with another member's word that it was left out.
void elasticCore(const ElasticMessage& message) {
  View view;
  view.lineage = numbered<Lineage>(1);
  view.number = 3;
  view.secret = numbered<ViewSecret>(2);
  for (const uint8_t number : {1, 2, 3}) {
    view.members.push_back({numbered<MemberId>(number), 1, {}});
    view.voters.push_back(numbered<MemberId>(number));
  }
  for (const uint8_t from : {2, 9}) {
    for (const bool proposes : {false, true}) {
      ElasticCore core(view.members[0], {}, view);
      if (proposes) core.want(view.number);
      const ElasticEffects effects = core.receive(numbered<MemberId>(from), message);
      require(core.view() == view || (from == 2 && core.state() == ElasticCore::State::kLeftOut));
      require(effects.refused.empty() || core.view() == view);
      require(!core.accepted());
    }
  }
}

// Bits that have no meaning are dropped, so only the second time must give the same.
void elastic_message(std::string_view bytes) {
  const auto parsed = decodeElasticMessage(bytes);
  if (!parsed) return;
  const std::string again = encodeElasticMessage(*parsed);
  const auto parsed_again = decodeElasticMessage(again);
  require(parsed_again && encodeElasticMessage(*parsed_again) == again);
  elasticCore(*parsed);
}

void store_call(std::string_view bytes) {
  if (const auto call = decodeStoreCall(bytes)) {
    const auto again = decodeStoreCall(encodeStoreCall(*call));
    require(again && encodeStoreCall(*again) == encodeStoreCall(*call));
    ViewStoreServer server([](const MemberId&, uint64_t, const StoreAnswer&) {});
    View view;
    view.number = call->view;
    view.members = {{numbered<MemberId>(1), 1, {}}};
    server.begin(view);
    server.onCall(numbered<MemberId>(1), 1, *call);
  }
  if (const auto answer = decodeStoreAnswer(bytes)) {
    require(encodeStoreAnswer(*answer) == bytes);
  }
}

void proof(std::string_view bytes) {
  if (const auto question = decodeQuestion(bytes)) require(encodeQuestion(*question) == bytes);
  if (const auto claim = decodeClaim(bytes)) require(encodeClaim(*claim) == bytes);
  if (const auto proof = decodeProof(bytes)) require(encodeProof(*proof) == bytes);
}

// What stands where there is no operation is dropped, so only the second time must give the same.
void issue_report(std::string_view bytes) {
  const auto parsed = decodeReport(bytes);
  if (!parsed) return;
  const std::string again = encode(*parsed);
  const auto parsed_again = decodeReport(again);
  require(parsed_again && encode(*parsed_again) == again);
}

struct Parser {
  const char* name;
  void (*run)(std::string_view);
};
constexpr Parser kParsers[] = {{"header", header},
                               {"failure", failure},
                               {"notice", notice},
                               {"hello", hello},
                               {"welcome", welcome},
                               {"refusal", refusal},
                               {"record", record},
                               {"failure_record", failure_record},
                               {"go", go},
                               {"address", address},
                               {"elastic_message", elastic_message},
                               {"store_call", store_call},
                               {"proof", proof},
                               {"issue_report", issue_report},
                               {"inbox", fuzz::inbox},
                               {"liveness_connection", fuzz::livenessConnection},
                               {"connection", fuzz::connection},
                               {"dial", fuzz::dial},
                               {"connector", fuzz::connector},
                               {"listener", fuzz::listener}};
const Parser* chosen = nullptr;

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  const char* name = std::getenv("TORCHFT_EXT_FUZZ");
  for (const Parser& parser : kParsers) {
    if (name != nullptr && std::strcmp(name, parser.name) == 0) chosen = &parser;
  }
  if (chosen != nullptr) return 0;
  std::fputs("TORCHFT_EXT_FUZZ must name a parser:", stderr);
  for (const Parser& parser : kParsers) std::fprintf(stderr, " %s", parser.name);
  std::fputs("\n", stderr);
  std::exit(2);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  chosen->run(std::string_view(reinterpret_cast<const char*>(data), size));
  return 0;
}
