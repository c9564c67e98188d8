// Places one piece of markup that the server drew; Streamlit's own HTML element would leave SVG out.
export default function ({ data, parentElement }) {
  const place = parentElement.querySelector(".pp-picture");
  const markup = new TextDecoder().decode(data);
  if (place.placed === markup) return;
  const opened = [...place.querySelectorAll("details")].map((one) => one.open);
  place.innerHTML = markup;
  place.querySelectorAll("details").forEach((one, index) => (one.open = opened[index] ?? false));
  place.placed = markup;
}
