// What stands under a rendezvous' keys, as values and as bytes.
//
// Under P/<rank>: a record (a member is here), or in its place a failure record (its attempt ended,
// and why). Under P/go/<token>: the roster. Strangers to the store's prefix cannot write them, but
// a member of another version can: decoding is total and bounded.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/identity.h"
#include "net/socket_address.h"
#include "torchft_ext/failure.h"

namespace torchft_ext {

// What a member tells the others about itself.
struct MemberRecord {
  Incarnation incarnation;
  Token token;
  std::string host;  // for error messages
  int64_t pid = -1;
  std::vector<SocketAddress> addresses;           // of its listener, tried in turn
  std::vector<SocketAddress> liveness_addresses;  // of its peer monitor; may be empty
  bool shares_memory = false;                     // with members of its host, for its collectives
  std::string purpose;  // what it means to form, in words; the same for all members
};
std::string encodeRecord(const MemberRecord& record);
std::optional<MemberRecord> decodeRecord(std::string_view bytes);

// Why an attempt ended, and where that began, so that those who know it already are not told again.
struct Ending {
  Failure failure;      // kind and cause
  Token origin;         // of the attempt that was the first to end; zero: its member had not come
  Incarnation culprit;  // the process that the cause names; zero: not known
};
struct FailureRecord {
  MemberRecord member;  // whose attempt it was
  Ending ending;
  std::vector<Token> meant_for;  // others' attempts, begun before it had been written
};
std::string encodeFailureRecord(const FailureRecord& failure_record);
std::optional<FailureRecord> decodeFailureRecord(std::string_view bytes);

// What everyone knows once an attempt has formed.
struct Roster {
  Nonce nonce;
  GenerationSecret secret;
  std::vector<MemberRecord> members;  // by rank
};
std::string encodeGo(const Token& token, const Roster& roster);
struct Go {
  Token token;
  Roster roster;
};
std::optional<Go> decodeGo(std::string_view bytes);

}  // namespace torchft_ext
