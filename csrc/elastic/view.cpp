#include "elastic/view.h"

#include <algorithm>

#include "elastic/elastic_codec.h"

namespace torchft_ext {

std::vector<MemberId> idsOf(const std::vector<Member>& members) {
  std::vector<MemberId> ids;
  ids.reserve(members.size());
  for (const Member& member : members) ids.push_back(member.id);
  return ids;
}

int View::rankOf(const MemberId& id) const {
  const auto found = std::find_if(members.begin(), members.end(),
                                  [&](const Member& member) { return member.id == id; });
  return found == members.end() ? -1 : static_cast<int>(found - members.begin());
}

const Outcome* View::outcomeOf(uint64_t index) const {
  const auto found = std::find_if(outcomes.begin(), outcomes.end(),
                                  [&](const Outcome& outcome) { return outcome.index == index; });
  return found == outcomes.end() ? nullptr : &*found;
}

std::string encodeView(const View& view) {
  ByteWriter writer;
  write(writer, view);
  return writer.take();
}

std::optional<View> decodeView(std::string_view bytes) {
  ByteReader reader(bytes);
  View view = readView(reader);
  if (!reader.atEnd()) return std::nullopt;
  return view;
}

std::string encodeAccepted(const AcceptedView& accepted) {
  ByteWriter writer;
  write(writer, accepted);
  return writer.take();
}

std::optional<AcceptedView> decodeAccepted(std::string_view bytes) {
  ByteReader reader(bytes);
  AcceptedView accepted = readAccepted(reader);
  if (!reader.atEnd()) return std::nullopt;
  return accepted;
}

}  // namespace torchft_ext
