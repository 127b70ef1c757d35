document.addEventListener("DOMContentLoaded", () => {
  // Cells know the head of their column, which phones show where a row takes two lines.
  for (const table of document.querySelectorAll("table")) {
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, column) => cell.setAttribute("data-label", heads[column] ?? ""));
    }
  }
  // A field above long tables: rows stay that contain all of its words.
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
