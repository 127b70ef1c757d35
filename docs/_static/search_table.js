// A field above long tables: rows stay that contain all of its words.
document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll(".searchable")) {
    const field = document.createElement("input");
    field.type = "search";
    field.placeholder = "Search, for example: qwen";
    field.setAttribute("aria-label", "Search in the table");
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/);
      for (const row of block.querySelectorAll("tbody tr")) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
    block.prepend(field);
  }
});
